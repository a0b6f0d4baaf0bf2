"""Pastes as terminals send them, and word keys of other programs' inputs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events

from localllm.conversation.history import History
from localllm_tui.control import commands
from localllm_tui.paste_input import PasteParser
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


def test_control_characters_of_a_paste_are_removed(drive: Any) -> None:
    async def play(d: Driver) -> None:
        d.app.post_message(events.Paste("a\x1b[31mb\x00c\x07\td"))
        await d.until(lambda: "d" in d.app.page.composer.text)
        assert d.app.page.composer.text == "a[31mbc\td"

    drive(play)


def test_a_paste_that_is_attached_has_one_kind_of_line_break_and_no_control_characters(
    drive: Any, server: ScriptedServer
) -> None:
    server.models = [{"id": "scripted"}]
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.until(lambda: d.app.chat.listed.n_ctx is None)
        d.app.post_message(events.Paste("a\x11b\r\nc\rd\n" * 50_000))
        await d.until(lambda: "pasted-1.txt" in d.screen())
        await d.ask("what?")

    drive(play)
    sent = server.requests[0]["messages"][0]["content"]
    assert "ab\nc\nd\nab\nc\nd\n" in sent
    assert not {"\r", "\x11"} & set(sent)


@pytest.mark.parametrize("key", ["ctrl+w", "alt+backspace", "ctrl+backspace"])
def test_the_usual_keys_remove_a_word(drive: Any, key: str) -> None:
    async def play(d: Driver) -> None:
        await d.type("two words")
        await d.press(key)
        assert d.app.page.composer.text == "two "

    drive(play)


def test_text_of_any_terminal_is_sent_well_formed(drive: Any, server: ScriptedServer) -> None:
    """A terminal in another encoding gives bytes that are no text, which Python reads as halves of
    surrogate pairs."""
    server.answer("ok")

    async def play(d: Driver) -> None:
        await commands.submit(d.app.chat, "a\udcff\udcfeb\x1b[31m\x07c\r\nd\te")
        await d.until(lambda: bool(server.requests) and not d.app.chat.answering)

    drive(play)
    assert server.requests[0]["messages"][0]["content"] == "a\ufffd\ufffdb[31mc\nd\te"


PASTES = [
    "log \x1b[31mERROR\x1b[0m at line 3\nnext line",
    "".join(map(chr, range(256))),
    "\x11\x1b\x03\x04\r",
    "\x1b[20\x1b[201\x1b[200~\x1b\x1b",
    "",
]


@given(st.sampled_from(PASTES) | st.text(), st.lists(st.integers(1, 9), min_size=1))
def test_all_of_a_paste_is_text_with_any_division_of_the_bytes(
    pasted: str, sizes: list[int]
) -> None:
    pasted = pasted.replace("\x1b[201~", "")
    stream = f"a\x1b[200~{pasted}\x1b[201~b\x1b[A"
    parser = PasteParser()
    read = []
    at = 0
    while at < len(stream):
        size = sizes[at % len(sizes)]
        read += parser.feed(stream[at : at + size])
        at += size
    assert [event.text for event in read if isinstance(event, events.Paste)] == [
        pasted.replace("\x1b", "").replace("\x00", "")
    ]
    assert [event.key for event in read if isinstance(event, events.Key)] == ["a", "b", "up"]


def test_a_long_paste_is_a_token_that_is_sent_as_its_text(
    drive: Any, server: ScriptedServer, history: History
) -> None:
    server.answer("ok")
    pasted = "\n".join(f"line {n}" for n in range(60))

    async def play(d: Driver) -> None:
        composer = d.app.page.composer
        await d.type("see ")
        d.app.post_message(events.Paste(pasted))
        await d.until(lambda: "60 lines" in composer.text)
        assert composer.text == "see [paste 1: 60 lines, Tab opens it]"
        await d.press("backspace")  # a paste is one character
        assert composer.text == "see "
        await d.press("ctrl+z")
        assert composer.text == "see [paste 1: 60 lines, Tab opens it]"
        await d.press("tab")
        assert composer.text == f"see {pasted}"
        await d.press("ctrl+u")
        composer.replace_text("")
        d.app.post_message(events.Paste(pasted))
        await d.until(lambda: "60 lines" in composer.text)
        await d.type(" ?")
        await d.press("enter")
        await d.until(lambda: bool(server.requests) and not d.app.chat.answering)

    drive(play)
    assert server.requests[0]["messages"][0]["content"] == f"{pasted} ?"
    assert history.messages(history.list()[0].id)[0].content == f"{pasted} ?"
