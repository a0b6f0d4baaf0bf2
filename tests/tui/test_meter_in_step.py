"""The meter shows the context that the server counts.

The states are stopped, reopened, failed, streaming and resized.
"""

from __future__ import annotations

from typing import Any

from localllm.conversation.history import History
from localllm_tui.control.formatting import bar
from tui.conftest import Driver
from tui.scripted_sse import Drop, Finish, Gate, Refuse, Say, ScriptedServer, UntilGone


def test_a_stopped_answer_is_counted_by_the_server_also_when_reopened(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.count = len
    server.play(Say(["one delta of many tokens"]), UntilGone())

    async def play(d: Driver) -> None:
        await d.send("question")
        await d.until(lambda: "one delta" in d.screen())
        await d.press("escape")
        await d.until(lambda: "32/1,000" in d.screen())

    async def reopened(d: Driver) -> None:
        await d.until(lambda: "32/1,000" in d.screen())
        assert not d.app.chat.answering

    drive(play)
    drive(reopened, resume=history.list()[0].id)


def test_an_answer_cut_by_a_crash_is_counted(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.count = len
    conv = history.create("t", "scripted")
    history.append(conv, "user", "question")
    history.append(conv, "assistant", "half", complete=False)

    async def play(d: Driver) -> None:
        await d.until(lambda: "12/1,000" in d.screen())
        assert d.app.chat.session.unfinished(d.app.chat.session.turns[-1])

    drive(play, resume=conv)


def test_the_servers_count_stays_after_a_broken_or_refused_answer(
    drive: Any, server: ScriptedServer
) -> None:
    server.count = len
    server.play(Say(["half"]), Drop())
    server.play(Refuse(503, {"message": "busy", "code": "server_busy"}))

    async def play(d: Driver) -> None:
        await d.ask("question")
        await d.until(lambda: "12/1,000" in d.screen())
        await d.ask("refused")
        await d.until(lambda: "Error: busy" in d.screen() and "12/1,000" in d.screen())
        assert d.app.chat.session.unanswered

    drive(play)


def test_the_prompt_counts_while_the_answer_streams(drive: Any, server: ScriptedServer) -> None:
    server.count = len
    gate = Gate()
    server.play(Say(["a"]), gate, Finish(usage=(300, 1, 0)))

    async def play(d: Driver) -> None:
        await d.send("q" * 300)
        await d.until(lambda: "301/1,000" in d.screen())
        assert d.app.chat.answering
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        assert "301/1,000" in d.screen()

    drive(play)


def test_the_servers_usage_is_not_counted_again(drive: Any, server: ScriptedServer) -> None:
    server.count = lambda _: 999
    server.answer("ok", usage=(11, 7, 3))

    async def play(d: Driver) -> None:
        await d.ask("hi")
        await d.type("x")
        await d.until(lambda: "999 of 1,000 tokens" in d.screen())
        assert "18/1,000" in d.screen()

    drive(play)


def test_the_status_line_follows_a_resize_at_once(drive: Any, server: ScriptedServer) -> None:
    server.answer("ok", usage=(11, 7, 3))

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "cached tokens" not in d.screen().splitlines()[-1]
        await d.pilot.resize_terminal(160, 24)
        await d.pilot.pause()
        assert "cached tokens" in d.screen().splitlines()[-1]
        await d.pilot.resize_terminal(60, 24)
        await d.pilot.pause()
        assert "cached tokens" not in d.screen().splitlines()[-1]
        assert "18/1,000" in d.screen().splitlines()[-1]

    drive(play)


def test_the_bar_shows_small_and_nearly_full_contexts_correctly() -> None:
    assert bar(2, 8192) == "▏" + "░" * 9
    assert bar(4096, 8192) == "█████░░░░░"
    assert bar(8191, 8192) == "█████████▉"
    assert bar(8192, 8192) == "█" * 10
