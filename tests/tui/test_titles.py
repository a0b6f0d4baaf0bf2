"""Titles of conversations.

The title is the beginning of the first question, until the idle model writes one or the user
sets one.
"""

from __future__ import annotations

from typing import Any

import pytest

from localllm.conversation.history import History, StoredMessage
from localllm_tui.control.titles import clean
from tui.conftest import Driver
from tui.scripted_sse import Finish, Gate, Refuse, Say, ScriptedServer


def test_a_title_is_generated_while_the_user_is_idle(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("Paris, of course")
    server.answer('"The capital of France."')

    async def play(d: Driver) -> None:
        await d.ask("capital of France?")
        await d.until(lambda: history.list()[0].title == "The capital of France")
        await d.until(lambda: d.app.chat.session.title == "The capital of France")

    drive(play, idle_after_s=0.0)
    assert [m["role"] for m in server.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert server.requests[1]["max_tokens"] == 24
    assert [m.content for m in history.messages(history.list()[0].id)] == [
        "capital of France?",
        "Paris, of course",
    ]


def test_a_slow_title_is_not_requested_again(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("Paris, of course")
    gate = Gate()
    server.play(gate, Say(["The capital of France"]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("capital of France?")
        await d.until(gate.reached.is_set)
        for _ in range(5):
            d.app.chat.tick()
            await d.pilot.pause()
        gate.opened.set()
        await d.until(lambda: history.list()[0].title == "The capital of France")

    drive(play, idle_after_s=0.0)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "reply",
    ["Paris, of course it is", "Here's a two-word conversation", "word " * 30, "?", "", None],
)
def test_an_unusable_title_is_neither_used_nor_requested_again(
    drive: Any, server: ScriptedServer, history: History, reply: str | None
) -> None:
    server.answer("Paris, of course it is")
    server.play(Refuse(503, {"message": "busy"}) if reply is None else Say([reply]), Finish())
    server.answer("fine")

    async def play(d: Driver) -> None:
        await d.ask("capital of France?")
        await d.until(lambda: len(server.requests) == 2)
        if reply is not None:
            await d.until(lambda: d.app.chat.session.titled == 1)
        d.app.chat.idle_after_s = None
        await d.ask("and?")

    drive(play, idle_after_s=0.0)
    assert history.list()[0].title == "capital of France?"


def test_the_user_can_set_another_title(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.ask("/title early")
        assert "with the first question" in d.screen()
        await d.ask("q")
        await d.ask("/title My own")
        d.app.chat.idle_after_s = 0.0
        await d.ask("/title")
        assert "title: My own" in d.screen()

    drive(play)
    assert (history.list()[0].title, history.list()[0].titled) == ("My own", 2)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("**Rivers of Europe**", "Rivers of Europe"),
        ("# Rivers of Europe\n\nmore", "Rivers of Europe"),
        ("Title: Rivers", "Rivers"),
        ("\n\n- “Rivers”.", "Rivers"),
        ("\x1b]0;\x07Rivers", "]0;Rivers"),
        ("Длинные реки", "Длинные реки"),
        ("长河", "长河"),
        ("Which rivers?", None),
        ("The Danube is", None),
        ("A two-word conversation", None),  # the conversation does not contain these words
        ("The rivers of Europe and how long each of them is", None),
        ("", None),
    ],
)
def test_titles_are_cleaned(said: str, title: str | None) -> None:
    asked = StoredMessage(1, "user", "What rivers does Europe have, 长河, длинные реки?")
    assert clean(said, [asked, StoredMessage(2, "assistant", "The Danube is long")]) == title
