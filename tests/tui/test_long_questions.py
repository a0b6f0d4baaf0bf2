"""A question that is too long is not sent.

Its token count is shown, and the failure affects no other turn.
"""

from __future__ import annotations

from typing import Any

import pytest

from localllm.conversation.history import History
from localllm.errors import UsageError
from localllm_tui.control import commands
from localllm_tui.control.session import Session
from tui.conftest import Driver
from tui.scripted_sse import Refuse, ScriptedServer

FULL = Refuse(400, {"message": "the prompt is too long", "code": "context_length_exceeded"})


def _stored(history: History) -> list[str]:
    return [m.content for m in history.messages(history.list()[0].id)]


def _sent(server: ScriptedServer, i: int) -> list[str]:
    return [m["content"] for m in server.requests[i]["messages"]]


def test_the_tokens_of_the_input_are_shown_before_it_is_sent(
    drive: Any, server: ScriptedServer
) -> None:
    server.count = len
    server.answer("ok", usage=(5, 2, 0))

    async def play(d: Driver) -> None:
        await d.type("hello")
        await d.until(lambda: "5 of 1,000 tokens in total" in d.screen())
        await d.ask("")
        await d.type("more")
        await d.until(lambda: "11 of 1,000 tokens in total" in d.screen())  # hello, ok and more
        await d.type("x" * 2000)
        await d.until(lambda: "2,011 of 1,000 tokens: too long" in d.screen())
        d.app.page.composer.replace_text("/retry")
        await d.until(lambda: "of 1,000 tokens" not in d.app.page.composer.border_title)

    drive(play)
    assert _sent(server, 0) == ["hello"]


def test_a_question_that_cannot_fit_is_not_sent_and_stays_in_the_input(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.count = len
    server.answer("hello")

    async def play(d: Driver) -> None:
        await d.send("x" * 200_000)
        await d.until(
            lambda: "the question alone has 200,000 tokens" in " ".join(d.screen().split())
        )
        assert len(d.app.page.composer.text) == 200_000
        d.app.page.composer.replace_text("")
        await d.ask("hi")

    drive(play, size=(120, 40))
    assert [_sent(server, i) for i in range(len(server.requests))] == [["hi"]]
    assert _stored(history) == ["hi", "hello"]


def test_compacting_is_offered_if_the_conversation_is_too_long(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.count = len
    server.answer("a" * 900, usage=(5, 900, 0))
    server.answer("Many letters a.")
    server.answer("two")

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.send("b" * 600)
        await d.until(
            lambda: "with the earlier messages it has 1,505 tokens" in " ".join(d.screen().split())
        )
        await commands.run_and_report(d.app.chat, "compact", "")
        await d.until(lambda: "gets a summary in place" in " ".join(d.screen().split()))
        await d.press("enter")
        await d.until(lambda: len(server.requests) == 3 and not d.app.chat.answering)

    drive(play, size=(120, 40))
    assert server.requests[1]["truncation"] == "auto"
    assert "Many letters a." in server.requests[2]["messages"][0]["content"]
    assert _stored(history)[2:] == ["b" * 600, "two"]


def test_a_question_that_failed_is_not_joined_to_the_next(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(FULL)
    server.answer("hello")
    server.answer("again")

    async def play(d: Driver) -> None:
        await d.ask("a very long paste")
        await d.ask("hi")
        await d.ask("and?")

    async def reopened(d: Driver) -> None:
        assert "so the model does not get it" in d.screen()

    drive(play)
    assert [_sent(server, i) for i in (1, 2)] == [["hi"], ["hi", "hello", "and?"]]
    assert _stored(history)[0] == "a very long paste"  # it remains on disk
    drive(reopened, resume=history.list()[0].id)


def test_a_failed_question_that_was_answered_later_is_sent_with_the_next(
    drive: Any, server: ScriptedServer
) -> None:
    server.play(FULL)
    server.answer("one")
    server.answer("two")

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("/retry")
        await d.ask("second")

    drive(play)
    assert _sent(server, 2) == ["first", "one", "second"]


def test_a_question_that_failed_is_edited_in_its_place(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.play(FULL)
    server.answer("good")

    async def play(d: Driver) -> None:
        await d.ask("too long")
        await d.send("/edit")
        assert d.app.page.composer.text == "too long"
        d.app.page.composer.replace_text("short")
        await d.ask("")
        assert "too long" not in d.screen()

    drive(play)
    assert _sent(server, 1) == ["short"]
    assert len(history.list()) == 1
    assert _stored(history) == ["short", "good"]


def test_a_question_that_failed_can_be_dropped(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("one")
    server.play(FULL)
    server.play(FULL)

    async def play(d: Driver) -> None:
        await d.ask("first")
        await d.ask("/drop")
        assert "the last question has an answer" in d.screen()
        await d.ask("second")
        assert "/drop removes it" in " ".join(d.screen().split())
        await d.ask("/drop")
        assert "second" not in d.screen()
        await d.ask("/new")
        await d.ask("only")
        await d.ask("/drop")

    drive(play)
    assert len(history.list()) == 1
    assert _stored(history) == ["first", "one"]


def test_dropping_the_only_question_keeps_the_system_prompt(history: History) -> None:
    session = Session(history, "m", system="Be brief")
    session.ask("q")
    session.drop_question()
    assert history.list() == []
    assert session.system == "Be brief"
    session.ask("r")
    assert [m["content"] for m in session.context(session.last_question)] == ["Be brief", "r"]
    with pytest.raises(UsageError):
        Session(history, "m").drop_question()
