"""An answer that was stopped, cut or interrupted can be continued: the same answer gets longer."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.conversation.history import History
from localllm_tui.widgets.answer import AnswerView
from tui.conftest import Driver, words_of
from tui.scripted_sse import Drop, Finish, Refuse, Say, ScriptedServer, UntilGone


def _stored(history: History) -> list[str]:
    return [m.content for m in history.messages(history.list()[0].id)]


def _asks_for_more(server: ScriptedServer, i: int, begun: str) -> None:
    sent = server.requests[i]
    assert sent["messages"][-1] == {"role": "assistant", "content": begun}
    assert sent["continue_final_message"] is True


def test_a_stopped_answer_is_continued(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(Say(["one ", "two"]), UntilGone())
    server.play(Say([" three", " four"]), Finish(usage=(20, 2, 18)))

    async def play(d: Driver) -> None:
        await d.send("count")
        await d.until(lambda: "one two" in d.screen())
        await d.press("escape")
        await d.until(lambda: "/more continues it" in d.screen())
        await d.ask("/more")
        assert [words_of(w) for w in d.app.page.transcript.query(AnswerView)] == [
            "one two three four"
        ]
        assert "22/1,000" in d.screen()
        assert "stopped" not in d.screen()
        await d.ask("/more")
        assert "the last answer is complete" in d.screen()

    drive(play)
    _asks_for_more(server, 1, "one two")
    assert _stored(history) == ["count", "one two three four"]
    assert len(history.tree(history.list()[0].id)[0]) == 2


@pytest.mark.parametrize("end", [Finish("length"), Drop()])
def test_a_cut_or_interrupted_answer_is_continued(
    drive: Any, server: ScriptedServer, history: History, end: Any
) -> None:
    server.play(Say(["half"]), end)
    server.play(Refuse(503, {"message": "busy", "code": "server_busy"}))
    server.answer(" way")

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.ask("/more")
        assert "busy" in d.screen()
        assert _stored(history) == ["q", "half"]  # the partial answer is kept
        await d.ask("/more")

    drive(play)
    _asks_for_more(server, 2, "half")
    assert _stored(history) == ["q", "half way"]


def test_more_without_an_answer_is_refused(drive: Any, server: ScriptedServer) -> None:
    server.play(Refuse(503, {"message": "busy", "code": "server_busy"}))

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.ask("/more")
        assert "there is no answer to continue" in d.screen()

    drive(play)


def test_continue_continues_a_stopped_answer_or_opens_the_last_conversation(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    history.append(history.create("before", "m"), "user", "an earlier question")
    server.play(Say(["half"]), Finish("length"))
    server.answer(" way")

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.ask("/continue")
        assert [words_of(w) for w in d.app.page.transcript.query(AnswerView)] == ["half way"]
        await d.ask("/continue")
        assert d.app.chat.session.title == "before"

    drive(play)
