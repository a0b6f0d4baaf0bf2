"""Full-text search of the conversations: with the trigram index if possible, else by a scan."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from localllm.conversation import stored_rows

# The index does not contain shorter words.
_INDEXED_CHARS = 3
# The characters of a snippet before the first hit, and its total length.
_CHARS_BEFORE_HIT = 24
_SNIPPET_CHARS = 120


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
    where, args = _contains_words_sql(query)
    rows = db.execute(
        "SELECT m.conversation_id, m.id, m.role, m.created_s, m.content FROM messages m"
        f" WHERE m.role <> 'system' AND {where} ORDER BY m.id DESC LIMIT ?",
        (*args, limit),
    ).fetchall()
    word = query.split()[0]
    hits = []
    for conversation_id, message_id, role, created_s, text in rows:
        snippet, at, end = _snippet(str(text), word)
        hits.append(SearchHit(conversation_id, message_id, role, created_s, snippet, at, end))
    return hits


@dataclass(frozen=True, slots=True)
class TurnText:
    """A turn's text as it was typed, without attached files."""

    turn_id: int
    role: str
    created_s: float
    text: str


_TYPED_SQL = (
    "COALESCE(CASE WHEN m.role = 'user' AND json_valid(m.meta)"
    " THEN json_extract(m.meta, '$.typed') END, m.content)"
)
# UNION without ALL ends the recursion if rows form a cycle.
_BRANCH_SQL = (
    "WITH RECURSIVE up(id, n) AS (SELECT head_id, 1 FROM conversations WHERE id = ?"
    " UNION SELECT m.parent_id, n + 1 FROM messages m JOIN up ON m.id = up.id WHERE n < ?) "
)


def newest_turns(db: sqlite3.Connection, conv_id: str, n: int) -> list[TurnText]:
    """The last `n` turns of the branch that is shown, oldest first. Raises sqlite3.Error."""
    where = "m.id IN (SELECT id FROM up)"
    return _turn_texts(db, _BRANCH_SQL, where, (conv_id, n, conv_id), most_chars=None)


def one_turn(db: sqlite3.Connection, conv_id: str, turn_id: int) -> list[TurnText]:
    """This turn. The list is empty if there is no such turn. Raises sqlite3.Error."""
    return _turn_texts(db, "", "m.id = ?", (turn_id, conv_id), most_chars=None)


def question_beginnings(db: sqlite3.Connection, conv_id: str, most_chars: int) -> list[TurnText]:
    """The first characters of all questions of all branches, oldest first. Raises sqlite3.Error."""
    return _turn_texts(db, "", "m.role = 'user'", (conv_id,), most_chars=most_chars)


def _turn_texts(
    db: sqlite3.Connection,
    with_clause: str,
    where: str,
    args: tuple[str | int, ...],
    *,
    most_chars: int | None,
) -> list[TurnText]:
    typed = _TYPED_SQL
    if most_chars is not None:
        typed = f"substr({_TYPED_SQL}, 1, {most_chars})"
    rows = db.execute(
        f"{with_clause}SELECT m.id, m.role, m.created_s, {typed} FROM messages m"
        f" WHERE {where} AND m.conversation_id = ? AND m.role <> 'system' ORDER BY m.id",
        args,
    )
    return [
        TurnText(
            message_id,
            stored_rows.role(role),
            stored_rows.number(created_s),
            stored_rows.text(text),
        )
        for message_id, role, created_s, text in rows
    ]


def typed_questions(db: sqlite3.Connection, query: str, limit: int) -> list[str]:
    """The questions as typed, without attached files, newest first, each once.

    Raises sqlite3.Error.
    """
    where, args = _contains_words_sql(query) if query.split() else ("1", [])
    rows = db.execute(
        "SELECT COALESCE(CASE WHEN json_valid(m.meta) THEN json_extract(m.meta, '$.typed') END,"
        " m.content) AS typed FROM messages m"
        f" WHERE m.role = 'user' AND {where} GROUP BY typed ORDER BY MAX(m.id) DESC",
        args,
    )
    words = query.casefold().split()
    questions: list[str] = []
    for (typed,) in rows:
        if len(questions) == limit:
            break
        if (
            isinstance(typed, str)
            and typed.strip()
            and all(word in typed.casefold() for word in words)
        ):
            questions.append(typed)
    return questions


def conversations(db: sqlite3.Connection, query: str) -> list[str]:
    """The ids of conversations whose title, or one of whose turns, contains all words.

    Raises sqlite3.Error.
    """
    where, args = _contains_words_sql(query)
    titles = " AND ".join("title LIKE ? ESCAPE '\\'" for _ in query.split())
    rows = db.execute(
        f"SELECT DISTINCT m.conversation_id FROM messages m WHERE m.role <> 'system' AND {where}"
        f" UNION SELECT id FROM conversations WHERE {titles}",
        (*args, *(_like_pattern(word) for word in query.split())),
    ).fetchall()
    return [row[0] for row in rows]


def _contains_words_sql(query: str) -> tuple[str, list[str]]:
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
        args += [_like_pattern(word) for word in long]
    for word in short:
        parts.append("m.content LIKE ? ESCAPE '\\'")
        args.append(_like_pattern(word))
    return " AND ".join(parts), args


def _like_pattern(word: str) -> str:
    return "%" + word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"


def _snippet(text: str, word: str) -> tuple[str, int, int]:
    """One line of `text` around `word`, and the word's position in it."""
    hit = text.lower().find(word.lower())
    position = min(max(hit, 0), len(text))
    line_start = max(0, position - _CHARS_BEFORE_HIT)
    line = " ".join(text[line_start : line_start + _SNIPPET_CHARS].split())
    if line_start:
        line = "…" + line
    word_start = line.lower().find(word.lower())
    if word_start < 0:
        return line, 0, 0
    return line, word_start, word_start + len(word)
