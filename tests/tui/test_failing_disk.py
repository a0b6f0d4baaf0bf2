"""A disk that is full, locked or damaged while a chat is open.

The chat reports it, continues, and writes the missing data when the disk allows.
"""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from localllm.conversation.history import History, HistoryError
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.session import Session
from tui.conftest import Disk, Driver
from tui.scripted_sse import Drop, Finish, Gate, Refuse, Say, ScriptedServer


def texts(history: History) -> list[str]:
    return [m.content for m in history.messages(history.list()[0].id)]


LONG = "word " * 3000


def test_an_answer_that_a_full_disk_refused_is_written_once_there_is_room(
    drive: Any, server: ScriptedServer, history: History, disk: Disk
) -> None:
    gate = Gate()
    server.play(Say(["one "]), gate, Say([LONG]), Finish())
    server.answer("fine")

    async def play(d: Driver) -> None:
        await d.send("q")
        await d.until(lambda: "one" in d.screen())
        disk.fill()
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        assert len(texts(history)[1]) < 100
        disk.free()
        await d.until(lambda: len(texts(history)[1]) > 10_000)
        await d.ask("r")

    drive(play)
    assert texts(history) == ["q", "one " + LONG, "r", "fine"]
    assert server.requests[1]["messages"][1]["content"] == "one " + LONG
    assert history.messages(history.list()[0].id)[1].complete


def test_an_answer_refused_by_the_disk_is_sent_and_written_with_the_next_question(
    drive: Any, server: ScriptedServer, history: History, disk: Disk
) -> None:
    gate = Gate()
    server.play(gate, Say([LONG]), Finish())
    server.answer("fine")

    async def play(d: Driver) -> None:
        await d.send("q")
        await d.until(gate.reached.is_set)
        disk.fill()
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        assert texts(history) == ["q"]
        await d.send("r " * 9000)  # refused: it does not fit either
        await d.until(lambda: "still in the input" in d.screen())
        assert d.app.page.composer.text.startswith("r r")
        disk.free()
        d.app.page.composer.replace_text("")
        await d.ask("r")

    drive(play, server_=server)
    assert texts(history) == ["q", LONG, "r", "fine"]


def test_an_answer_that_ends_while_the_file_is_locked_is_written_later(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    gate = Gate()
    server.play(gate, Say([LONG]), Finish())
    other = sqlite3.connect(history.path, isolation_level=None)

    async def play(d: Driver) -> None:
        await d.send("q")
        await d.until(gate.reached.is_set)
        other.execute("BEGIN IMMEDIATE")
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        assert "locked" in d.screen()
        assert texts(history) == ["q"]
        other.execute("ROLLBACK")
        await d.until(lambda: texts(history) == ["q", LONG])
        await d.until(lambda: "now saved" in d.screen())

    drive(play, toasts=True)
    other.close()


@pytest.mark.parametrize(
    "script", [[Drop()], [Refuse(503, {"message": "busy", "code": "server_busy"})], [Finish()]]
)
def test_a_failed_answer_on_a_full_disk_is_an_error_and_no_crash(
    drive: Any, server: ScriptedServer, history: History, script: list[Any]
) -> None:
    gate = Gate()
    server.play(Say(["first"]), Finish())
    server.play(*([gate] if not isinstance(script[0], Refuse) else []), *script)
    server.answer("again")

    async def play(d: Driver) -> None:
        await d.ask("q")
        write = history.transaction

        def full(*_: Any) -> Any:
            raise HistoryError("the conversations can't be written: database or disk is full")

        await d.send("r")
        history.transaction = full  # type: ignore[method-assign]
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        await d.pilot.pause()
        assert d.app.is_running
        history.transaction = write  # type: ignore[method-assign]
        await d.ask("/retry")
        assert "again" in d.screen()

    drive(play)
    assert texts(history) == ["q", "first", "r", "again"]


def test_every_key_and_command_reports_a_disk_that_refuses_writes(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    session = Session(history, "scripted")
    for n in range(3):
        session.ask(f"q{n}")
        answer = PendingAnswer(session)
        answer.add(f"a{n}")
        answer.finish({"finish_reason": "stopped"})
    history.create("another", "m")
    server.play(Refuse(503, {"message": "busy", "code": "server_busy"}))
    server.answer("more")

    async def play(d: Driver) -> None:
        def full(*_: Any) -> Any:
            raise HistoryError("the conversations can't be written: database or disk is full")

        history.transaction = full  # type: ignore[method-assign]
        for command in (
            "/title x", "/system x", "/compact", "/branch", "/retry", "/more", "/drop", "/new", "/continue", "/import "
                                                                                                             "no.json",
        ):  # fmt: skip
            await d.ask(command)
        await d.press("f2", "up", "d", "d", "b", "e")
        await d.ask("changed")
        await d.press("escape")
        await d.press("ctrl+o", "ctrl+x", "ctrl+x")
        assert "full" in d.screen()
        await d.press("escape")
        assert d.app.is_running

    drive(play, resume=session.id, size=(120, 40))
    assert len(history.tree(str(session.id))[0]) == 6


def test_a_damaged_file_is_refused_or_used_and_never_a_crash(
    drive: Any, server: ScriptedServer, tmp_path: Path
) -> None:
    path = tmp_path / "damaged" / "c.db"
    with History(path) as store:
        session = Session(store, "m")
        for n in range(60):
            session.ask(f"question {n} " * 40)
            answer = PendingAnswer(session)
            answer.add("answer " * 60)
            answer.finish({"finish_reason": "stop"})
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    chance, opened = random.Random(22), 0

    async def play(d: Driver) -> None:
        await d.ask("/list question")
        await d.press("down", "right", "escape")
        await d.ask("/find answer")
        await d.press("escape")
        await d.ask("/new")
        await d.ask("/continue")
        await d.send("one more")
        await d.until(lambda: not d.app.chat.answering)
        assert d.app.is_running

    for _ in range(8):
        for name in ("c.db-wal", "c.db-shm"):
            path.with_name(name).unlink(missing_ok=True)
        at = chance.randrange(100, len(whole) - 3000)
        path.write_bytes(whole[:at] + chance.randbytes(3000) + whole[at + 3000 :])
        server.scripts.clear()
        server.answer("ok")
        with suppress(HistoryError), History(path) as store:
            store.list()
            opened += 1
            drive(play, history_=store, size=(80, 24))
    assert opened
