"""Pastes as terminals send them, and the word keys that other inputs have."""

from __future__ import annotations

from typing import Any

import pytest
from textual import events

from tui.conftest import Driver
from tui.scripted_sse import ScriptedServer


@pytest.mark.parametrize(
    "pasted", ["one\r\ntwo\r\n\r\nthree", "one\rtwo\r\rthree", "one\ntwo\n\nthree"]
)
def test_a_paste_has_one_kind_of_line_break(
    drive: Any, server: ScriptedServer, pasted: str
) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        d.app.post_message(events.Paste(pasted))
        await d.until(lambda: "three" in d.app.page.composer.text)
        assert d.app.page.composer.text == "one\ntwo\n\nthree"
        await d.press("enter")
        await d.until(lambda: bool(server.requests) and not d.app.chat.answering)

    drive(play)
    assert server.requests[0]["messages"][0]["content"] == "one\ntwo\n\nthree"


def test_control_characters_of_a_paste_stay_out(drive: Any) -> None:
    async def play(d: Driver) -> None:
        d.app.post_message(events.Paste("a\x1b[31mb\x00c\x07\td"))
        await d.until(lambda: "d" in d.app.page.composer.text)
        assert d.app.page.composer.text == "a[31mbc\td"

    drive(play)


@pytest.mark.parametrize("key", ["ctrl+w", "alt+backspace", "ctrl+backspace"])
def test_a_word_is_removed_by_the_keys_for_it(drive: Any, key: str) -> None:
    async def play(d: Driver) -> None:
        await d.type("two words")
        await d.press(key)
        assert d.app.page.composer.text == "two "

    drive(play)
