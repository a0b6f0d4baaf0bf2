"""Full-text search of the conversations: with the trigram index if possible, else by a scan."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

# The index does not contain shorter words.
_INDEXED_CHARS = 3
# The characters of a snippet before the first hit, and its total length.
_BEFORE = 24
_SNIPPET = 120


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A turn that was found, with one line of its text around the first word (`snippet`).

    `at` and `end` are the word's position in the snippet (both 0: it is not in there).
    """

    conversation_id: str
    message_id: int
    role: str
    created_s: float
    snippet: str
    at: int
    end: int


def turns(db: sqlite3.Connection, query: str, limit: int) -> list[SearchHit]:
    """The turns that contain all words of `query`, ignoring case, newest first.

    Raises sqlite3.Error.
    """
    if not query.split():
        return []
    where, args = _containing(query)
    rows = db.execute(
        "SELECT m.conversation_id, m.id, m.role, m.created_s, m.content FROM messages m"
        f" WHERE m.role <> 'system' AND {where} ORDER BY m.id DESC LIMIT ?",
        (*args, limit),
    ).fetchall()
    word = query.split()[0]
    hits = []
    for conversation_id, message_id, role, created_s, text in rows:
        snippet, at, end = _around(str(text), word)
        hits.append(SearchHit(conversation_id, message_id, role, created_s, snippet, at, end))
    return hits


def typed_questions(db: sqlite3.Connection, query: str, limit: int) -> list[str]:
    """The questions as typed, without attached files, newest first, each once.

    Raises sqlite3.Error.
    """
    where, args = _containing(query) if query.split() else ("1", [])
    rows = db.execute(
        "SELECT COALESCE(CASE WHEN json_valid(m.meta) THEN json_extract(m.meta, '$.typed') END,"
        " m.content) AS typed FROM messages m"
        f" WHERE m.role = 'user' AND {where} GROUP BY typed ORDER BY MAX(m.id) DESC",
        args,
    )
    words = query.casefold().split()
    found: list[str] = []
    for (typed,) in rows:
        if len(found) == limit:
            break
        if (
            isinstance(typed, str)
            and typed.strip()
            and all(word in typed.casefold() for word in words)
        ):
            found.append(typed)
    return found


def conversations(db: sqlite3.Connection, query: str) -> list[str]:
    """The ids of conversations whose title, or one of whose turns, contains all words.

    Raises sqlite3.Error.
    """
    where, args = _containing(query)
    titles = " AND ".join("title LIKE ? ESCAPE '\\'" for _ in query.split())
    rows = db.execute(
        f"SELECT DISTINCT m.conversation_id FROM messages m WHERE m.role <> 'system' AND {where}"
        f" UNION SELECT id FROM conversations WHERE {titles}",
        (*args, *(_like(word) for word in query.split())),
    ).fetchall()
    return [row[0] for row in rows]


def _containing(query: str) -> tuple[str, list[str]]:
    """The SQL condition that a message `m` contains all words, and its arguments."""
    words = query.replace("\0", " ").split()
    short = [word for word in words if len(word) < _INDEXED_CHARS]
    long = [word for word in words if len(word) >= _INDEXED_CHARS]
    parts = []
    args = []
    if long:
        # Turns that are streaming or were never completed are not in the index.
        unfinished = " AND ".join("content LIKE ? ESCAPE '\\'" for _ in long)
        parts.append(
            "m.id IN (SELECT rowid FROM found WHERE found MATCH ?"
            f" UNION ALL SELECT id FROM messages WHERE complete = 0 AND {unfinished})"
        )
        quoted = ['"' + word.replace('"', '""') + '"' for word in long]
        args.append(" ".join(quoted))
        args += [_like(word) for word in long]
    for word in short:
        parts.append("m.content LIKE ? ESCAPE '\\'")
        args.append(_like(word))
    return " AND ".join(parts), args


def _like(word: str) -> str:
    return "%" + word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"


def _around(text: str, word: str) -> tuple[str, int, int]:
    """One line of `text` around `word`, and the word's position in it."""
    found = text.lower().find(word.lower())
    at = min(max(found, 0), len(text))
    start = max(0, at - _BEFORE)
    line = " ".join(text[start : start + _SNIPPET].split())
    if start:
        line = "…" + line
    begin = line.lower().find(word.lower())
    if begin < 0:
        return line, 0, 0
    return line, begin, begin + len(word)
