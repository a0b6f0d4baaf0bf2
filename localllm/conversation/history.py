"""Conversations on disk: trees of turns in one SQLite file.

It is safe to use from any thread and does not lose data if a program dies.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from localllm import paths
from localllm.conversation import history_schema, history_search, stored_rows
from localllm.errors import LocalLLMError, NotFoundError

# Another window may be upgrading the file to a newer schema.
_OPENING_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_MS = 500


class HistoryError(
    LocalLLMError,
    code="history_error",
    default_hint="check the free disk space and the permissions of the data directory",
):
    """The conversations' file can't be opened or written."""


class TurnGoneError(HistoryError, code="turn_gone", default_hint="open the conversation again"):
    """Another window has removed the turn that the new turn was to follow."""


@dataclass(frozen=True, slots=True)
class ConversationSummary:
    """One entry in the list of conversations.

    Times are Unix seconds. `n_messages` counts the messages of all branches. `titled` is the origin
    of the title: 0 the beginning of the first question, 1 a model, 2 a person.
    """

    id: str
    title: str
    model: str
    created_s: float
    updated_s: float
    n_messages: int
    titled: int = 0


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message.

    `complete` is False while its answer streams, and stays False if the program died meanwhile.
    `parent_id` is the turn that it follows (0: no turn). For a system prompt it is the turn after
    which the prompt was set.
    """

    id: int
    role: str
    content: str
    reasoning: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    created_s: float = 0.0
    parent_id: int = 0


class History:
    """The store of conversations.

    Every method is one transaction and may be called from any thread. Its data is in the disk's
    journal when it returns. Raises NotFoundError for an unknown conversation, HistoryError for a
    broken file.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path or paths.data_dir() / "conversations.db")
        self._lock = threading.RLock()
        try:
            paths.private_dir(self.path.parent)
            if self.path.exists() and not self.path.is_file():
                raise OSError("it is not a file")
            # The file is created before SQLite opens it, so that it never has wider permissions.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            if os.name == "posix":
                os.chmod(self.path, 0o600)
            self._db = sqlite3.connect(
                self.path, check_same_thread=False, isolation_level=None, timeout=_OPENING_TIMEOUT_S
            )
            self._db.text_factory = _lenient
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if version > history_schema.VERSION:
                self._db.close()
                raise HistoryError(
                    f"the conversations file is from a newer release (schema {version}, this "
                    f"release supports {history_schema.VERSION})",
                    hint=(
                        "upgrade localllm, or move conversations.db to another "
                        "folder to start a new file"
                    ),
                )
            history_schema.prepare(self._db)
            # From now on, a user interface waits for calls. Other programs write for milliseconds,
            # and a rejected write can be retried later.
            self._db.execute(f"PRAGMA busy_timeout = {_LOCK_TIMEOUT_MS}")
        except (OSError, sqlite3.Error, ValueError, KeyError, TypeError) as e:
            # the last three: unreadable data in an old row
            if hasattr(self, "_db"):
                self._db.close()
            raise _unusable(self.path, "opened", e) from e

    def create(self, title: str, model: str) -> str:
        # Like `secrets`, but without its imports: a chat imports this module at the start.
        conv_id = os.urandom(8).hex()
        now_s = time.time()
        with self.transaction() as db:
            db.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, 0, 0)",
                (conv_id, title, model, now_s, now_s),
            )
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
        parent: int | None = None,
    ) -> int:
        """Add a message and return its id. A streaming answer starts with `complete=False`.

        `update_partial` then updates it. `parent` is the turn to follow (0: no turn; None: the
        head). The new turn becomes the conversation's head, unless it is a system prompt. Raises
        TurnGoneError if the parent no longer exists.
        """
        now_s = time.time()
        with self.transaction() as db:
            _update_conversation(db, _SET_UPDATED, now_s, conv_id)
            if parent is None:
                parent = self._head(db, conv_id)
            elif parent and not self._has_message(db, conv_id, parent):
                raise TurnGoneError("the turn before this one was removed in another window")
            message = StoredMessage(0, role, content, reasoning, meta or {}, complete, now_s)
            message_id = self._insert(db, conv_id, parent, message)
            if role != "system":
                db.execute(
                    "UPDATE conversations SET head_id = ? WHERE id = ?", (message_id, conv_id)
                )
            return message_id

    def add(self, conv_id: str, turns: Sequence[StoredMessage]) -> dict[int, int]:
        """Add turns of another conversation atomically, and return the new id of each old one.

        They are added in the order of their ids, so parents come before their children. The last
        one becomes the head.
        """
        new_ids = {0: 0}
        with self.transaction() as db:
            _update_conversation(db, _SET_UPDATED, time.time(), conv_id)
            head = 0
            for turn in sorted(turns, key=attrgetter("id")):
                parent = new_ids.get(turn.parent_id, 0)
                new_ids[turn.id] = self._insert(db, conv_id, parent, turn)
                if turn.role != "system":
                    head = new_ids[turn.id]
            db.execute("UPDATE conversations SET head_id = ? WHERE id = ?", (head, conv_id))
        return new_ids

    def update_partial(
        self,
        message_id: int,
        content: str,
        *,
        reasoning: str | None = None,
        meta: dict[str, Any] | None = None,
        complete: bool = False,
    ) -> None:
        """Replace a streaming message's text so far. `complete=True` closes it.

        A value of `None` keeps the stored one.
        """
        meta_json = None if meta is None else json.dumps(meta)
        with self.transaction() as db:
            (conv_id,) = _row(
                db, "message", message_id, "SELECT conversation_id FROM messages WHERE id = ?"
            )
            db.execute(
                "UPDATE messages SET content = ?, reasoning = COALESCE(?, reasoning),"
                " meta = COALESCE(?, meta), complete = ? WHERE id = ?",
                (content, reasoning, meta_json, int(complete), message_id),
            )
            _update_conversation(db, _SET_UPDATED, time.time(), conv_id)

    def tree(self, conv_id: str) -> tuple[list[StoredMessage], int]:
        """All messages of all branches by age, and the id of the head (0: the conversation is
        empty)."""
        with self._locked("read") as db:
            head = self._head(db, conv_id)
            rows = db.execute(
                "SELECT id, role, content, reasoning, meta, complete, created_s, parent_id"
                " FROM messages WHERE conversation_id = ? ORDER BY id",
                (conv_id,),
            ).fetchall()
        return [_message(row) for row in rows], head

    def messages(self, conv_id: str) -> list[StoredMessage]:
        """The branch that ends at the head, in order, with the system prompts set along it."""
        all_messages, head = self.tree(conv_id)
        by_id = {m.id: m for m in all_messages}
        branch_ids = {0}
        while head in by_id and head not in branch_ids:
            branch_ids.add(head)
            head = by_id[head].parent_id
        branch = []
        for message in all_messages:
            turn_id = message.parent_id if message.role == "system" else message.id
            if turn_id in branch_ids:
                branch.append(message)
        return branch

    def versions(self, conv_id: str, parent: int, role: str) -> list[int]:
        """The ids of the turns that follow `parent`, oldest first: the versions of one turn."""
        with self._locked("read") as db:
            rows = db.execute(
                "SELECT id FROM messages WHERE conversation_id = ? AND parent_id = ? AND role = ? "
                "ORDER BY created_s, id",
                (conv_id, parent, role),
            ).fetchall()
        return [row[0] for row in rows]

    def set_head(self, conv_id: str, message_id: int) -> None:
        """Show the branch that ends at `message_id` (0: an empty one) from now on.

        The order of the list does not change.
        """
        with self.transaction() as db:
            if message_id and not self._has_message(db, conv_id, message_id):
                raise TurnGoneError("this turn was removed in another window")
            _update_conversation(
                db, "UPDATE conversations SET head_id = ? WHERE id = ?", message_id, conv_id
            )

    def get(self, conv_id: str) -> ConversationSummary:
        with self._locked("read") as db:
            row = _row(db, "conversation", conv_id, _SUMMARY + " WHERE c.id = ?")
        return _summary(row)

    def holds(self, conv_id: str) -> bool:
        with self._locked("read") as db:
            row = db.execute("SELECT 1 FROM conversations WHERE id = ?", (conv_id,)).fetchone()
        return row is not None

    def list(self, query: str | None = None, limit: int = 50) -> list[ConversationSummary]:
        """Conversations, newest first.

        `query` keeps those whose title or turns contain all its words, ignoring case.
        """
        with self._locked("read") as db:
            if query is None or not query.split():
                rows = db.execute(_SUMMARY + _NEWEST, (limit,)).fetchall()
            else:
                ids = history_search.conversations(db, query)
                marks = ",".join("?" * len(ids))
                rows = db.execute(
                    f"{_SUMMARY} WHERE c.id IN ({marks}){_NEWEST}", (*ids, limit)
                ).fetchall()
        return [_summary(row) for row in rows]

    def search(self, query: str, limit: int = 200) -> Sequence[history_search.SearchHit]:
        """The turns that contain all words of `query`, ignoring case, newest first."""
        with self._locked("read") as db:
            return history_search.turns(db, query, limit)

    def typed_questions(self, query: str = "", limit: int = 200) -> Sequence[str]:
        """The typed questions that contain all words of `query`, ignoring case, newest first, each
        once."""
        with self._locked("read") as db:
            return history_search.typed_questions(db, query, limit)

    def newest_turns(self, conv_id: str, n: int) -> Sequence[history_search.TurnText]:
        """The last `n` turns of the branch that is shown, oldest first."""
        with self._locked("read") as db:
            return history_search.newest_turns(db, conv_id, n)

    def turn_text(self, conv_id: str, turn_id: int) -> Sequence[history_search.TurnText]:
        """This turn. The list is empty if it was removed."""
        with self._locked("read") as db:
            return history_search.one_turn(db, conv_id, turn_id)

    def questions(self, conv_id: str, most_chars: int) -> Sequence[history_search.TurnText]:
        """The first characters of all questions of all branches, oldest first."""
        with self._locked("read") as db:
            return history_search.question_beginnings(db, conv_id, most_chars)

    def rename(self, conv_id: str, title: str, *, titled: int = 2) -> None:
        """Change the title. `titled` is 1 for a model's title, 2 for a person's.

        The order of the list does not change.
        """
        with self.transaction() as db:
            sql = "UPDATE conversations SET title = ?, titled = ? WHERE id = ?"
            _update_conversation(db, sql, title, titled, conv_id)

    def remove(self, message_id: int) -> int:
        """Remove one turn and all turns after it on any branch. Returns the number of removed
        turns.

        If the head is removed, the parent of the removed turn becomes the head.
        """
        with self.transaction() as db:
            sql = "SELECT conversation_id, parent_id FROM messages WHERE id = ?"
            conv_id, parent = _row(db, "message", message_id, sql)
            removed_ids = [r[0] for r in db.execute(_DESCENDANTS, (message_id, conv_id)).fetchall()]
            db.executemany("DELETE FROM messages WHERE id = ?", [(n,) for n in removed_ids])
            if self._head(db, conv_id) in removed_ids:
                db.execute("UPDATE conversations SET head_id = ? WHERE id = ?", (parent, conv_id))
            return len(removed_ids)

    def delete(self, conv_id: str) -> None:
        with self.transaction() as db:
            _update_conversation(db, "DELETE FROM conversations WHERE id = ?", conv_id)
        with suppress(OSError):
            self.facts_path(conv_id).unlink(missing_ok=True)

    def facts_path(self, conv_id: str) -> Path:
        """The file of the conversation's lasting facts. It may not exist."""
        return self.path.parent / "facts" / f"{conv_id}.md"

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _insert(db: sqlite3.Connection, conv_id: str, parent: int, message: StoredMessage) -> int:
        values = (
            conv_id,
            parent,
            message.role,
            message.content,
            message.reasoning,
            json.dumps(message.meta),
        )
        cursor = db.execute(
            "INSERT INTO messages (conversation_id, parent_id, role, content, reasoning, meta,"
            " complete, created_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, int(message.complete), message.created_s),
        )
        return int(cursor.lastrowid or 0)

    @staticmethod
    def _head(db: sqlite3.Connection, conv_id: str) -> int:
        """The id of the newest turn that is shown; 0 if there is no turn. Raises NotFoundError."""
        sql = "SELECT head_id FROM conversations WHERE id = ?"
        return stored_rows.whole_number(_row(db, "conversation", conv_id, sql)[0])

    @staticmethod
    def _has_message(db: sqlite3.Connection, conv_id: str, message_id: int) -> bool:
        cursor = db.execute(
            "SELECT 1 FROM messages WHERE id = ? AND conversation_id = ?", (message_id, conv_id)
        )
        return cursor.fetchone() is not None

    @contextmanager
    def _locked(self, action: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as e:
                raise _unusable(self.path, action, e) from e

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self._locked("written") as db:
            db.execute("BEGIN IMMEDIATE")
            with db:  # commits, or rolls back
                yield db


def _message(row: Sequence[Any]) -> StoredMessage:
    """The message in a row, whose columns may be damaged."""
    message_id, role, content, reasoning, meta, complete, created_s, parent = row
    return StoredMessage(
        message_id,
        stored_rows.role(role),
        stored_rows.text(content),
        stored_rows.optional_text(reasoning),
        stored_rows.meta(meta),
        bool(complete),
        stored_rows.number(created_s),
        stored_rows.whole_number(parent),
    )


def _summary(row: Sequence[Any]) -> ConversationSummary:
    """The conversation in a row, whose columns may be damaged."""
    conv_id, title, model, created_s, updated_s, n_messages, titled = row
    return ConversationSummary(
        str(conv_id),
        stored_rows.text(title),
        stored_rows.text(model),
        stored_rows.number(created_s),
        stored_rows.number(updated_s),
        n_messages,
        stored_rows.whole_number(titled),
    )


def _lenient(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _unusable(path: Path, action: str, error: Exception) -> HistoryError:
    """The error for a file that SQLite can't use. A damaged file has another cause and another way
    out than a full disk."""
    damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(
        error, sqlite3.OperationalError | sqlite3.IntegrityError
    )
    if not damaged:
        reason = getattr(error, "strerror", None) or error
        return HistoryError(f"the conversations can't be {action}: {reason} ({path})")
    return HistoryError(
        f"the conversations can't be {action}: {path} is damaged ({error})",
        hint="put a copy of it back; or move it away, and the chat starts a new one",
    )


def _unknown(kind: str, key: str | int) -> NotFoundError:
    return NotFoundError(f"no {kind} {key!r} in the history")


def _update_conversation(db: sqlite3.Connection, sql: str, *values: str | float) -> None:
    """Change the conversation whose id is the last of `values`. Raises NotFoundError."""
    if db.execute(sql, values).rowcount == 0:
        raise _unknown("conversation", str(values[-1]))


def _row(db: sqlite3.Connection, kind: str, key: str | int, sql: str) -> tuple[Any, ...]:
    """The row with this key. Raises NotFoundError."""
    row = db.execute(sql, (key,)).fetchone()
    if row is None:
        raise _unknown(kind, key)
    return tuple(row)


_SUMMARY = (
    "SELECT c.id, c.title, c.model, c.created_s, c.updated_s,"
    " (SELECT COUNT(*) FROM messages m WHERE m.conversation_id = c.id AND m.role <> 'system'),"
    " c.titled FROM conversations c"
)
_SET_UPDATED = "UPDATE conversations SET updated_s = ? WHERE id = ?"
_NEWEST = " ORDER BY c.updated_s DESC, c.rowid DESC LIMIT ?"
# UNION without ALL ends the recursion if a row refers to itself or rows form a cycle.
_DESCENDANTS = (
    "WITH RECURSIVE below(id) AS (SELECT ? UNION SELECT m.id FROM messages m"
    " JOIN below b ON m.parent_id = b.id WHERE m.conversation_id = ? AND m.role <> 'system')"
    " SELECT id FROM below"
)
