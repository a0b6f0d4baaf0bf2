"""Disturbances by disks, other programs and models.

No message is lost, no control sequence reaches the terminal, and the chat does not crash.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localllm.conversation import history as history_module
from localllm.conversation.history import History, HistoryError
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.session import Session
from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.transcript import TurnView
from tui.conftest import Disk, Driver, words_of
from tui.scripted_sse import Finish, Gate, Say, ScriptedServer


def test_a_locked_file_is_reported_and_the_typed_text_stays(
    drive: Any, server: ScriptedServer, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer("ok")
    other = sqlite3.connect(history.path, isolation_level=None)

    async def play(d: Driver) -> None:
        other.execute("BEGIN IMMEDIATE")
        await d.send("kept")
        await d.until(lambda: "Error:" in d.screen())
        assert "locked" in d.screen()
        assert d.app.page.composer.text == "kept"
        other.execute("ROLLBACK")
        await d.press("enter")
        await d.until(lambda: not d.app.chat.answering and bool(server.requests))

    drive(play, size=(120, 40))
    other.close()
    assert [m.content for m in history.messages(history.list()[0].id)] == ["kept", "ok"]


def test_a_disk_that_fills_up_during_an_answer_loses_no_text_on_screen(
    drive: Any, server: ScriptedServer, history: History, disk: Disk
) -> None:
    gate = Gate()
    server.play(Say(["one "]), gate, Say(["word " * 3000]), Finish())
    server.answer("fine")

    async def play(d: Driver) -> None:
        await d.send("q")
        await d.until(lambda: "one" in d.screen())
        disk.fill()
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        assert len(words_of(d.app.page.transcript.query(AnswerView).last())) > 10_000
        disk.free()
        await d.ask("r")
        assert d.app.is_running

    drive(play)
    assert [m.content for m in history.messages(history.list()[0].id)][-2:] == ["r", "fine"]


def test_a_file_damaged_in_the_middle_is_refused_in_a_sentence_or_read(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    with History(path) as store:
        conv = store.create("t", "m")
        for n in range(200):
            store.append(conv, "user", f"text {n} " * 50)
    whole = path.read_bytes()
    outcomes = []
    for at in range(4096, len(whole), len(whole) // 12):
        path.write_bytes(whole[:at] + b"\xff" * 2000 + whole[at + 2000 :])
        try:
            with History(path) as damaged:
                damaged.list()
                damaged.search("text 17")
                damaged.append(conv, "user", "more")
                damaged.messages(conv)
            outcomes.append("read")
        except (HistoryError, history_module.NotFoundError):
            outcomes.append("refused")
    assert len(outcomes) >= 11


def test_the_history_is_intact_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    code = (
        "import sys; from localllm.conversation.history import History\n"
        "from localllm_tui.control.answering import PendingAnswer\n"
        "from localllm_tui.control.session import Session\n"
        "h = History(sys.argv[1]); s = Session(h, 'm'); print('ready', flush=True)\n"
        "while True:\n"
        "    q = s.ask('q'); a = PendingAnswer(s); a.add('word ' * 50); a.finish({'finish_reason': "
        "'stop'})\n"
        "    s.ask('q again', instead=q); b = PendingAnswer(s); b.add('x'); b.finish({})\n"
        "    if len(s.turns) > 1: s.remove(s.turns[-1])\n"
    )
    path = tmp_path / "c.db"
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=os.environ
        )
        assert child.stdout is not None
        child.stdout.readline()
        before = path.stat().st_size
        with History(path) as watching:
            while not watching.list() or watching.list()[0].n_messages < 20:
                assert child.poll() is None, before
            child.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
            child.communicate()
            for summary in watching.list():
                turns, head = watching.tree(summary.id)
                ids = {t.id for t in turns} | {0}
                assert head in ids
                assert all(t.parent_id in ids for t in turns)
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            db.execute("INSERT INTO found(found, rank) VALUES ('integrity-check', 0)")


NASTY = [
    "\x1b[2J\x1b[H\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07",
    "\x9b31m\x90q\x9c\x85\x00\x08\x08\x7f",
    "\u202ertl override\u202c \u2066isolate\u2069",
    "日本語の長い文章です。" * 20,
    "שלום עולם مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301\u0302\u0303 z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "[bold red]markup[/] [/] [@click=app.quit]x[/] {x} %s \\",
    "```\nunclosed " + "x" * 500,
    "| a | b |\n|---|\n| " + "wide " * 40 + " |",
    "<script>alert(1)</script> &amp; <!-- -->",
    "a\u2028b\u2029c\ufeffd\u200be\r\nf\rg",
    "\t\ttabs\tand  spaces   ",
]


def test_any_text_is_shown_listed_found_and_reopened(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    session = Session(history, "scripted")
    for text in NASTY:
        session.ask(text)
        answer = PendingAnswer(session)
        answer.add(text, text)
        answer.finish({"finish_reason": "stop", "model": text[:30]})
    server.play(Say([c for text in NASTY for c in (text[:7], text[7:])]), Finish())

    def check(d: Driver) -> None:
        shown = d.screen()
        assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in shown)
        assert not any(c in shown for c in "\u202a\u202b\u202d\u202e\u2066\u2067\u2068")
        assert d.app.is_running

    async def play(d: Driver) -> None:
        check(d)
        await d.press("f2", *["up"] * 8, "t", "e")
        check(d)
        await d.press("escape")
        check(d)
        await d.press("ctrl+o", "right")
        check(d)
        await d.press(*"wide")
        check(d)
        await d.press("escape", "f1", "escape")
        await d.ask("go")
        await d.ask("/title \x1b[2Jevil [red]")
        check(d)
        assert len(d.app.page.transcript.query(TurnView)) >= 20

    drive(play, resume=session.id, size=(60, 20))
