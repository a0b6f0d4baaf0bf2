"""Conversations on disk: one SQLite file, safe from any thread, that loses nothing when a program dies mid-answer."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm import paths
from localllm.errors import LocalLLMError, NotFoundError

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    model TEXT NOT NULL,
    created_s REAL NOT NULL,
    updated_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    reasoning TEXT,
    meta TEXT NOT NULL DEFAULT '{}',
    complete INTEGER NOT NULL DEFAULT 1,
    created_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS messages_of ON messages(conversation_id, id);
CREATE INDEX IF NOT EXISTS by_age ON conversations(updated_s DESC);
"""


class HistoryError(LocalLLMError):
    """The conversations' file can't be opened or written."""

    code = "history_error"
    default_hint = "check the free disk space and the permissions of the data directory"


@dataclass(frozen=True, slots=True)
class ConversationSummary:
    """One line of the list of conversations. Times are Unix seconds."""

    id: str
    title: str
    model: str
    created_s: float
    updated_s: float
    n_messages: int


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message. `complete` is False while its answer is (or was, if the program died) still streaming."""

    id: int
    role: str
    content: str
    reasoning: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    created_s: float = 0.0


def default_path() -> Path:
    """Where this user's conversations live."""
    return paths.data_dir() / "conversations.db"


class History:
    """The store. Every method is one transaction, may be called from any thread, and has reached the disk's journal
    when it returns. Unknown conversations raise NotFoundError; a broken file raises HistoryError."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._lock = threading.RLock()
        try:
            paths.private_dir(self.path.parent)
            # The file is created by us, before SQLite does, so that it never exists with wider permissions.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            if os.name == "posix":
                os.chmod(self.path, 0o600)
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=10.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if version > _SCHEMA_VERSION:
                self._db.close()
                raise HistoryError(
                    f"the conversations were written by a newer release (schema {version}, this one reads "
                    f"{_SCHEMA_VERSION})",
                    hint="upgrade localllm, or move conversations.db away to start a new one",
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        except (OSError, sqlite3.Error) as e:
            if hasattr(self, "_db"):
                self._db.close()
            raise HistoryError(f"the conversations can't be opened: {e}") from e

    def create(self, title: str, model: str) -> str:
        """Start a conversation and return its id."""
        conv_id = secrets.token_hex(8)
        now = time.time()
        with self._write() as db:
            db.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", (conv_id, title, model, now, now))
        return conv_id

    def append(
        self,
        conv_id: str,
        role: str,
        content: str,
        *,
        reasoning: str | None = None,
        meta: dict[str, Any] | None = None,
        complete: bool = True,
    ) -> int:
        """Add a message and return its id. An answer about to stream starts `complete=False`; see `update_partial`."""
        now = time.time()
        with self._write() as db:
            self._touch(db, conv_id, now)
            cursor = db.execute(
                "INSERT INTO messages (conversation_id, role, content, reasoning, meta, complete, created_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (conv_id, role, content, reasoning, json.dumps(meta or {}), int(complete), now),
            )
            return int(cursor.lastrowid or 0)

    def update_partial(
        self,
        message_id: int,
        content: str,
        *,
        reasoning: str | None = None,
        meta: dict[str, Any] | None = None,
        complete: bool = False,
    ) -> None:
        """Replace a streaming message's text so far; `complete=True` closes it. `None` keeps what is stored."""
        with self._write() as db:
            row = db.execute("SELECT conversation_id FROM messages WHERE id = ?", (message_id,)).fetchone()
            if row is None:
                raise NotFoundError(f"no message {message_id} in the history")
            db.execute(
                "UPDATE messages SET content = ?, reasoning = COALESCE(?, reasoning), meta = COALESCE(?, meta),"
                " complete = ? WHERE id = ?",
                (content, reasoning, None if meta is None else json.dumps(meta), int(complete), message_id),
            )
            self._touch(db, row[0], time.time())

    def messages(self, conv_id: str) -> list[StoredMessage]:
        """All messages in order."""
        with self._read() as db:
            if db.execute("SELECT 1 FROM conversations WHERE id = ?", (conv_id,)).fetchone() is None:
                raise NotFoundError(f"no conversation {conv_id!r} in the history")
            rows = db.execute(
                "SELECT id, role, content, reasoning, meta, complete, created_s FROM messages"
                " WHERE conversation_id = ? ORDER BY id",
                (conv_id,),
            ).fetchall()
        return [StoredMessage(r[0], r[1], r[2], r[3], json.loads(r[4]), bool(r[5]), r[6]) for r in rows]

    def get(self, conv_id: str) -> ConversationSummary:
        """One conversation's line of the list."""
        with self._read() as db:
            row = db.execute(_SUMMARY + " WHERE c.id = ?", (conv_id,)).fetchone()
        if row is None:
            raise NotFoundError(f"no conversation {conv_id!r} in the history")
        return ConversationSummary(*row)

    def list(self, query: str | None = None, limit: int = 50) -> list[ConversationSummary]:
        """The newest first; `query` keeps those whose title or messages contain it, whatever the case (ASCII)."""
        sql, args = _SUMMARY, []
        if query:
            pattern = "%" + query.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
            sql += (
                " WHERE c.title LIKE ? ESCAPE '\\' OR EXISTS (SELECT 1 FROM messages m"
                " WHERE m.conversation_id = c.id AND m.content LIKE ? ESCAPE '\\')"
            )
            args = [pattern, pattern]
        with self._read() as db:
            rows = db.execute(sql + " ORDER BY c.updated_s DESC, c.rowid DESC LIMIT ?", (*args, limit)).fetchall()
        return [ConversationSummary(*row) for row in rows]

    def rename(self, conv_id: str, title: str) -> None:
        """Change the title; the order of the list does not change."""
        with self._write() as db:
            if db.execute("UPDATE conversations SET title = ? WHERE id = ?", (title, conv_id)).rowcount == 0:
                raise NotFoundError(f"no conversation {conv_id!r} in the history")

    def truncate(self, conv_id: str, before_message_id: int) -> int:
        """Remove `before_message_id` and everything after it (edit and ask again); returns how many went."""
        with self._write() as db:
            self._touch(db, conv_id, time.time())
            gone = db.execute(
                "DELETE FROM messages WHERE conversation_id = ? AND id >= ?", (conv_id, before_message_id)
            )
            return gone.rowcount

    def delete(self, conv_id: str) -> None:
        """Remove a conversation and its messages."""
        with self._write() as db:
            if db.execute("DELETE FROM conversations WHERE id = ?", (conv_id,)).rowcount == 0:
                raise NotFoundError(f"no conversation {conv_id!r} in the history")

    def close(self) -> None:
        """Release the file; the object is dead afterwards."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _touch(db: sqlite3.Connection, conv_id: str, now: float) -> None:
        if db.execute("UPDATE conversations SET updated_s = ? WHERE id = ?", (now, conv_id)).rowcount == 0:
            raise NotFoundError(f"no conversation {conv_id!r} in the history")

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as e:
                raise HistoryError(f"the conversations can't be read: {e}") from e

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except sqlite3.Error as e:
                raise HistoryError(f"the conversations can't be written: {e}") from e


_SUMMARY = (
    "SELECT c.id, c.title, c.model, c.created_s, c.updated_s,"
    " (SELECT COUNT(*) FROM messages m WHERE m.conversation_id = c.id) FROM conversations c"
)
