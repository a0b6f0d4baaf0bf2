"""A conversation too long for the context, in the chat: nothing typed is lost, and /compact is the
way on."""

from __future__ import annotations

import io
from typing import Any

import pytest

from localllm.conversation.history import History
from localllm_tui import line_chat
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.session import Session
from tui.conftest import Driver
from tui.scripted_sse import Comment, Finish, Refuse, Say, ScriptedServer

FULL = Refuse(
    400,
    {
        "message": "the prompt has 1200 tokens and the served context is 1000",
        "code": "context_length_exceeded",
    },
)
LEFT_OUT = Comment("compacted 4 messages, 345 tokens")


def _stored(history: History) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in history.messages(history.list()[0].id)]


def test_a_full_context_keeps_the_question_and_compact_answers_it(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("one")
    server.play(FULL)
    server.play(LEFT_OUT, Say(["two"]), Finish())
    server.answer("three")

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("second")
        assert "1200 tokens and the served context is 1000" in d.screen()
        assert "/compact leaves out the oldest messages" in d.screen()
        assert _stored(history)[-1] == ("user", "second")
        await d.ask("/compact")
        await d.until(lambda: "4 oldest messages were left out" in " ".join(d.screen().split()))
        assert "Error" not in d.screen()
        await d.ask("third")

    drive(play, size=(120, 40))
    assert [r.get("truncation") for r in server.requests] == [None, None, "auto", "auto"]
    # all of it is sent
    assert [m["content"] for m in server.requests[2]["messages"]] == ["first", "one", "second"]
    assert [text for _, text in _stored(history)] == [
        "first",
        "one",
        "second",
        "two",
        "third",
        "three",
    ]


def test_compacting_is_kept_with_the_conversation_and_taken_back(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("one")
    server.answer("two")
    server.answer("three")

    async def before(d: Driver) -> None:
        await d.ask("first")
        await d.ask("/compact")
        assert "all of it stays here and on disk" in " ".join(d.screen().split())
        await d.ask("/compact everything")
        assert "/compact everything is not known" in d.screen()

    async def after(d: Driver) -> None:
        await d.ask("second")
        await d.ask("/compact off")
        await d.ask("third")

    drive(before, size=(120, 40))
    drive(after, size=(120, 40), resume=history.list()[0].id)
    assert [r.get("truncation") for r in server.requests] == [None, "auto", None]


def test_an_edited_question_stays_compacted(history: History) -> None:
    session = Session(history, "m")
    session.ask("first")
    session.set_compacts(True)
    PendingAnswer(session).finish({})
    session.ask("second")
    session.ask("first, differently", instead=session.turns[0])
    assert session.compacts
    assert session.branch_off(session.turns[0]).compacts
    assert not Session(history, "m").compacts


def test_compact_before_any_question_says_so(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.ask("/compact")
        assert "nothing was asked yet" in d.screen()

    drive(play)


def test_where_even_that_does_not_help_compact_is_not_offered(
    drive: Any, server: ScriptedServer
) -> None:
    server.play(FULL)
    server.play(FULL)

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("/compact")
        assert "Error: the prompt has 1200 tokens" in d.screen()
        assert "/compact" not in d.screen()
        assert "/edit" in d.screen()

    drive(play)


def test_no_warning_of_a_full_context_where_it_is_compacted(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("ok", usage=(900, 50, 0))
    server.answer("ok", usage=(900, 60, 0))

    async def play(d: Driver) -> None:
        await d.ask("hi")
        assert "/compact lets the oldest messages be left out" in " ".join(d.screen().split())

    async def compacted(d: Driver) -> None:
        d.app.chat.client.sampling = {"truncation": "auto"}
        await d.ask("hi")
        assert "% full" not in d.screen()

    drive(play)
    drive(compacted)
    assert server.requests[1]["truncation"] == "auto"


def test_line_by_line_compact_asks_again(
    server: ScriptedServer,
    history: History,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.play(FULL)
    server.play(LEFT_OUT, Say(["two"]), Finish())
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n/compact\n/quit\n"))
    line_chat.talk(ChatOptions(ChatClient(server.base_url), history, "scripted"))
    out = capsys.readouterr()
    assert "two" in out.out
    assert "/compact leaves out the oldest messages and asks again" in out.err
    assert "the 4 oldest messages were left out" in out.err
    assert [r.get("truncation") for r in server.requests] == [None, "auto"]
