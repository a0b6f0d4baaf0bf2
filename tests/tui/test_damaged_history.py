"""Damaged conversation files and damaged imported files.

The chat opens the rest, or names the damaged file.
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localllm.conversation.history import History, HistoryError
from localllm.errors import UsageError
from localllm_tui.control.import_export import import_file, to_json
from localllm_tui.control.session import Session
from tui.conftest import Driver
from tui.test_snapshots import conversation

VALUES: list[object] = [-1, float("inf"), b"\xff\xfe", "[" * 100_000]
META = (
    "model",
    "finish_reason",
    "prompt_tokens",
    "typed",
    "attached",
    "tools",
    "reread_tokens",
    "identical_calls",
)
MESSAGE_COLUMNS = ("parent_id", "role", "content", "reasoning", "meta", "complete", "created_s")
CONVERSATION_COLUMNS = ("title", "model", "created_s", "updated_s", "head_id", "titled")


def _columns() -> list[tuple[str, str]]:
    found = [("messages", name) for name in MESSAGE_COLUMNS]
    return found + [("conversations", name) for name in CONVERSATION_COLUMNS]


@pytest.mark.parametrize(("table", "column"), _columns())
def test_damaged_rows_are_opened(drive: Any, history: History, table: str, column: str) -> None:
    conv_id = conversation(history)

    async def play(d: Driver) -> None:
        for value in VALUES:
            with closing(sqlite3.connect(history.path)) as db:
                before = db.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
                db.execute(f"UPDATE {table} SET {column} = ?", (value,))
                db.commit()
            await d.app.chat.open(Session(history, "scripted", conv_id=conv_id))
            await d.ask("/list")
            await d.press("escape", "ctrl+r", "escape", "f2", "escape")
            history.typed_questions("text")
            history.search("text")
            to_json(Session(history, "scripted", conv_id=conv_id))
            with closing(sqlite3.connect(history.path)) as db:
                db.executemany(
                    f"UPDATE {table} SET {column} = ? WHERE rowid = ?",
                    [(old, rowid) for rowid, old in before],
                )
                db.commit()
        assert d.app.is_running

    drive(play)


@pytest.mark.parametrize("member", [*META, "tool in tools"])
def test_damaged_metadata_is_left_out(drive: Any, history: History, member: str) -> None:
    conv_id = conversation(history)

    async def play(d: Driver) -> None:
        for value in (-1, 10**30, "text", [5], [{"name": 5}]):
            meta = (
                {member: value} if member in META else {"tools": [{"name": "t", "result": value}]}
            )
            with closing(sqlite3.connect(history.path)) as db:
                db.execute("UPDATE messages SET meta = ?", (json.dumps(meta),))
                db.commit()
            await d.app.chat.open(Session(history, "scripted", conv_id=conv_id))
            await d.press("f2", "escape")
        assert d.app.is_running

    drive(play)


def _imported(tmp_path: Path, history: History, text: str | bytes) -> str:
    file = tmp_path / "chat.json"
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    file.write_bytes(text)
    try:
        return import_file(history, file, "m").ids[0]
    except UsageError as e:
        return e.message


def test_a_damaged_file_is_imported_or_refused(history: History, tmp_path: Path) -> None:
    message = {"id": 1, "role": "user", "content": "hi", "meta": {}, "created_s": 1, "parent": 0}
    whole = {"format": "localllm-conversation", "version": 1, "title": "t", "messages": [message]}
    values = ["5", "-1", "1e999", "NaN", "null", '"x"', '"\\ud83d"', "[1]", '{"a":1}', "1" * 5000]
    values.append("[" * 100_000 + "]" * 100_000)
    for value in values:
        for name in (*whole, "head", "model"):
            changed = json.dumps({**whole, name: "VALUE"}).replace('"VALUE"', value)
            assert _imported(tmp_path, history, changed)
        for name in message:
            inner = {**message, name: "VALUE"}
            changed = json.dumps({**whole, "messages": [inner]}).replace('"VALUE"', value)
            assert _imported(tmp_path, history, changed)
    for text in ("", "[]", "\ud83d", b"\xff", b"\x00" * 10, "[" * 500_000):
        assert "is not a conversation" in _imported(tmp_path, history, text)


def test_a_pipe_or_a_folder_is_no_conversation(history: History, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match=r"not a file|directory"):
            import_file(history, path, "m")


def test_a_damaged_database_is_reported_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "conversations.db"
    path.write_bytes(b"not a database, but some text" * 1000)
    with pytest.raises(HistoryError) as told:
        History(path)
    assert str(path) in told.value.message
    assert "is damaged" in told.value.message
    assert "move it away" in told.value.hint
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(HistoryError, match="it is not a file"):
        History(path)
