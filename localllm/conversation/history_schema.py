"""The tables of the conversation file, and the migration of an older file in one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable

VERSION = 2

# A conversation is a tree. A question's parent is the answer before it (0: no answer), an answer's
# parent is its question. Turns with the same parent are versions of one turn. `head_id` is the last
# turn of the branch that is shown (0: no turn). A system prompt is not a turn: its parent is the
# turn after which it was set, and the newest one applies to every branch. `titled`: 0 the title is
# the beginning of the first question, 1 a model made it, 2 a person.
#
# parent_id has no default on purpose. If a program of an earlier release has this file open, it
# can't write a turn without a parent and reports an error.
_TABLES = (
    """
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL,
        model TEXT NOT NULL,
        created_s REAL NOT NULL,
        updated_s REAL NOT NULL,
        head_id INTEGER NOT NULL,
        titled INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE messages (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
        parent_id INTEGER NOT NULL,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        reasoning TEXT,
        meta TEXT NOT NULL,
        complete INTEGER NOT NULL,
        created_s REAL NOT NULL
    )
    """,
    "CREATE INDEX messages_of ON messages(conversation_id, id)",
    "CREATE INDEX versions_of ON messages(conversation_id, parent_id)",
    "CREATE INDEX by_age ON conversations(updated_s DESC)",
    "CREATE INDEX unfinished ON messages(id) WHERE complete = 0",
)

# Only finished turns are indexed: a streaming answer is written twice a second, but indexed once.
# Tokens are trigrams, so parts of words are found, and languages without spaces can be searched.
_SEARCH = (
    "CREATE VIRTUAL TABLE found USING fts5("
    "content, content='messages', content_rowid='id', tokenize='trigram')",
    """
    CREATE TRIGGER found_new AFTER INSERT ON messages WHEN new.complete BEGIN
        INSERT INTO found(rowid, content) VALUES (new.id, new.content);
    END
    """,
    """
    CREATE TRIGGER found_gone AFTER DELETE ON messages WHEN old.complete BEGIN
        INSERT INTO found(found, rowid, content) VALUES ('delete', old.id, old.content);
    END
    """,
    """
    CREATE TRIGGER found_changed_from AFTER UPDATE OF content, complete ON messages
    WHEN old.complete AND (NOT new.complete OR old.content <> new.content) BEGIN
        INSERT INTO found(found, rowid, content) VALUES ('delete', old.id, old.content);
    END
    """,
    """
    CREATE TRIGGER found_changed_to AFTER UPDATE OF content, complete ON messages
    WHEN new.complete AND (NOT old.complete OR old.content <> new.content) BEGIN
        INSERT INTO found(rowid, content) VALUES (new.id, new.content);
    END
    """,
)


def prepare(db: sqlite3.Connection) -> None:
    """Upgrade `db` from any earlier schema to this one, completely or not at all.

    Raises sqlite3.Error.
    """
    if _version(db) == VERSION:
        return
    # Otherwise dropping the old table would delete the rows that refer to it. The pragma has no
    # effect within a transaction.
    db.execute("PRAGMA foreign_keys=OFF")
    try:
        db.execute("BEGIN IMMEDIATE")
        with db:  # commits, or rolls back
            upgrade = _FROM.get(_version(db))  # read again: another window may have been first
            if upgrade is not None:
                upgrade(db)
                db.execute(f"PRAGMA user_version={VERSION}")
    finally:
        db.execute("PRAGMA foreign_keys=ON")


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _create(db: sqlite3.Connection) -> None:
    for statement in (*_TABLES, *_SEARCH):
        db.execute(statement)


def _from_1(db: sqlite3.Connection) -> None:
    """Upgrade from version 1: a list of messages, with earlier versions of an answer in its
    `meta`."""
    for table in ("conversations", "messages"):
        db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    for index in ("messages_of", "by_age"):  # the new indexes use the same names
        db.execute(f"DROP INDEX IF EXISTS {index}")
    for statement in _TABLES:
        db.execute(statement)
    db.execute(
        "INSERT INTO conversations SELECT id, title, model, created_s, updated_s, 0, 0 FROM "
        "old_conversations"
        " ORDER BY rowid"
    )
    next_id = 1 + db.execute("SELECT COALESCE(MAX(id), 0) FROM old_messages").fetchone()[0]
    heads: dict[str, int] = {}
    times: dict[str, float] = {}
    rows = db.execute(
        "SELECT id, conversation_id, role, content, reasoning, meta, complete, created_s FROM "
        "old_messages ORDER BY id"
    ).fetchall()
    for n, conv_id, role, content, reasoning, meta_json, complete, created_s in rows:
        parent = heads.get(conv_id, 0)
        meta = json.loads(meta_json)
        earlier = meta.pop("earlier", ())
        for version in earlier:
            values = (version["content"], version["reasoning"], json.dumps(version["meta"]), 1)
            # Version 1 has no time here. The question's time sorts it before the later answer.
            db.execute(
                _ROW, (next_id, conv_id, parent, role, *values, times.get(conv_id, created_s))
            )
            next_id += 1
        db.execute(
            _ROW,
            (n, conv_id, parent, role, content, reasoning, json.dumps(meta), complete, created_s),
        )
        if role != "system":
            heads[conv_id] = n
            times[conv_id] = created_s
    db.executemany(
        "UPDATE conversations SET head_id = ? WHERE id = ?", [(n, c) for c, n in heads.items()]
    )
    db.execute("DROP TABLE old_messages")
    db.execute("DROP TABLE old_conversations")
    for statement in _SEARCH:
        db.execute(statement)
    db.execute("INSERT INTO found(rowid, content) SELECT id, content FROM messages WHERE complete")


_ROW = (
    "INSERT INTO messages (id, conversation_id, parent_id, role, content, reasoning, meta, "
    "complete, created_s)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_FROM: dict[int, Callable[[sqlite3.Connection], None]] = {0: _create, 1: _from_1}
