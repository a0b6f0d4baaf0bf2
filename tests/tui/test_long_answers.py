"""A long answer is one widget.

Each frame draws only the part on screen. Scrolling shows all of the text.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from textual.color import Color

from localllm_tui.widgets.answer import AnswerView
from localllm_tui.widgets.contrast import contrast
from localllm_tui.widgets.text import GrowingText
from support.long_markdown import words
from tui.conftest import Driver, words_of
from tui.scripted_models import ScriptedModelService, choice
from tui.scripted_sse import Finish, Gate, Say, ScriptedServer


async def reopen(d: Driver) -> None:
    """Show the conversation as if it was opened from disk."""
    streamed = d.app.screen.query_one(AnswerView)
    await d.app.chat.open(
        type(d.app.chat.session)(d.app.chat.session.history, "m", conv_id=d.app.chat.session.id)
    )
    await d.until(lambda: [v is not streamed for v in d.app.screen.query(AnswerView)] == [True])
    await d.pilot.pause()


def test_the_first_text_is_drawn_at_once_after_a_busy_time(
    drive: Any, server: ScriptedServer
) -> None:
    gate = Gate()
    server.play(gate, Say(["Bonjour"]), Finish())

    async def play(d: Driver) -> None:
        await d.send("hello in French")
        await d.until(lambda: "waiting for the first token" in d.screen())
        busy_until_s = time.thread_time() + 0.5
        while time.thread_time() < busy_until_s:
            pass
        view = d.app.screen.query_one(AnswerView)
        view.feed("Salut")
        await d.pilot.pause()
        assert "Salut" in d.screen()
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)

    drive(play)


def test_the_number_of_widgets_does_not_grow_with_the_answer(
    drive: Any, server: ScriptedServer
) -> None:
    counted: list[int] = []
    for tokens in (20, 2000):
        server.play(Say(list(words(tokens))), Finish())

    async def play(d: Driver) -> None:
        for _ in range(2):
            await d.ask("go on")
            counted.append(len(d.app.screen.query(AnswerView).last().query("*")))

    drive(play)
    assert counted[0] == counted[1]


def test_all_of_a_long_answer_can_be_scrolled_to(drive: Any, server: ScriptedServer) -> None:
    server.play(Say([*list(words(1500)), "\n\nthe very end"]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("go on")
        await d.until(lambda: "the very end" in d.screen())
        height = d.app.page.transcript.virtual_size.height
        seen: list[str] = []
        while d.app.page.transcript.scroll_y > 0:
            await d.press("pageup")
            await d.until(
                lambda: d.app.page.transcript.scroll_y == d.app.page.transcript.scroll_target_y
            )
            seen += [line.strip() for line in d.screen().splitlines()]
        assert d.app.page.transcript.virtual_size.height == height  # the position does not change
        for n in range(1, 5):
            assert any(f"Section {n}" in line for line in seen), n
        assert any(line.endswith("go on") for line in seen)
        await d.pilot.resize_terminal(100, 30)
        await d.until(lambda: d.app.page.transcript.virtual_size.height != height)
        await d.press(*["pagedown"] * 60)
        await d.until(lambda: "the very end" in d.screen())

    drive(play)


def at_the_end(d: Driver) -> bool:
    """Return whether the transcript is scrolled to its end. One frame may be late."""
    transcript = d.app.page.transcript
    return transcript.scroll_y == transcript.max_scroll_y


def test_a_stored_long_answer_looks_the_same_when_reopened(
    drive: Any, server: ScriptedServer
) -> None:
    said = "".join(words(1500)) + "\n\nthe very end"
    server.play(Say([said[i : i + 7] for i in range(0, len(said), 7)]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("go on")
        await d.until(lambda: "the very end" in d.screen() and at_the_end(d))
        shown, height = d.screen(), d.app.page.transcript.virtual_size.height
        await reopen(d)
        await d.until(lambda: "the very end" in d.screen())
        # A frame may still show the previous scroll position, so wait for the whole screen.
        await d.until(lambda: d.screen() == shown)
        assert d.app.page.transcript.virtual_size.height == height
        assert words_of(d.app.screen.query_one(AnswerView)) == said

    drive(play)


@pytest.mark.parametrize(
    "line",
    [
        "日本語の長い段落は空白なしで書かれるので、画面の端で折り返されます。" * 5,
        "https://example.org/" + "a-very-long-path/" * 12,
        "คำภาษาไทยไม่มีช่องว่างระหว่างคำ" * 8,
        "한국어 문장은 띄어쓰기가 있습니다. " * 10,
        "words and a " + "w" * 150 + " then words again",
        "שלום עולם " * 20 + "מילים",
        "नमस्ते दुनिया " * 15 + "शब्द",
        "中文段落没有空格,所以屏幕会在任何字之间换行。" * 6,
        "Русский текст с длинными словами " * 6 + "слово",
        "نص عربي طويل " * 15 + "كلمة",
        "ភាសាខ្មែរមិនមានចន្លោះរវាងពាក្យ" * 6,
        "👩‍👩‍👧‍👦 family 🇫🇷 flags e\u0301 " * 8 + "end",
        "$$\\frac{a}{b} = \\sqrt{\\frac{c}{d}}$$",
        "the formula $e^{-\\frac{x^2}{2}}$ in a " + "long " * 20 + r"text, and \(a_{ij}\) too",
    ],
)
def test_a_wrapped_line_is_copied_with_its_own_characters(
    drive: Any, server: ScriptedServer, line: str
) -> None:
    line = line.strip()
    server.play(Say([line]), Finish())
    copied: list[str] = []

    async def play(d: Driver) -> None:
        await d.ask("go on")
        text = d.app.screen.query_one(AnswerView).query(GrowingText).last()
        text.text_select_all()
        await d.pilot.pause()
        await d.press("ctrl+c")
        assert copied == [line]

    drive(play, copy=lambda text: copied.append(text.strip("\n")) or True)


def test_a_selection_is_copied_as_the_original_text(drive: Any, server: ScriptedServer) -> None:
    line = (
        "a line of so many words that the screen has to break it somewhere in the middle, twice "
        "or more often, for sure"
    )
    code = "all:\n\t\tcc -o x y.c  \n\n \techo\tok"
    server.play(Say([f"{line}\n\n- {line}\n\n```make\n{code}\n```\n"]), Finish())
    copied: list[str] = []

    async def play(d: Driver) -> None:
        await d.ask("go on")
        text = d.app.screen.query_one(AnswerView).query(GrowingText).last()
        text.text_select_all()
        await d.pilot.pause()
        await d.press("ctrl+c")
        assert copied == [f"{line}\n\n• {line}\n\n{code}"]

    def copy(text: str) -> bool:
        copied.append(text.strip("\n"))
        return True

    drive(play, copy=copy)


def test_a_click_opens_a_link_and_nothing_else(drive: Any, server: ScriptedServer) -> None:
    server.play(Say(["see [there](https://example.org/a'b) and **that**"]), Finish())

    async def play(d: Driver) -> None:
        opened: list[str] = []
        d.app.open_url = lambda url, **_: opened.append(url)  # type: ignore[method-assign]
        await d.ask("go on")
        text = d.app.screen.query_one(AnswerView).query(GrowingText).last()
        await d.pilot.click(text, offset=(1, 0))
        assert not opened
        await d.pilot.click(text, offset=(5, 0))
        assert opened == ["https://example.org/a'b"]

    drive(play)


def test_a_link_that_would_start_a_program_is_not_opened(
    drive: Any, server: ScriptedServer
) -> None:
    server.play(Say(["[a](vscode://file/etc/passwd) [b](/etc/passwd) [c](//host/share)"]), Finish())

    async def play(d: Driver) -> None:
        opened: list[str] = []
        d.app.open_url = lambda url, **_: opened.append(url)  # type: ignore[method-assign]
        await d.ask("go on")
        text = d.app.screen.query_one(AnswerView).query(GrowingText).last()
        for x in (0, 2, 4):
            await d.pilot.click(text, offset=(x, 0))
        assert not opened
        await d.until(lambda: "not opened" in d.screen())

    drive(play, toasts=True)


def test_the_colours_of_an_answer_follow_the_theme(drive: Any, server: ScriptedServer) -> None:
    server.play(Say(["# Title"]), Finish())

    async def play(d: Driver) -> None:
        def colour() -> object:
            strips = d.app.screen._compositor.render_strips()
            return next(
                s.style.color for strip in strips for s in strip if "Title" in s.text and s.style
            )

        def near(seen: Any, named: Color) -> bool:
            shade = Color.from_rich_color(seen)
            return contrast(shade, named) < 2 and abs(shade.hsl.h - named.hsl.h) < 0.02

        await d.ask("go on")
        for theme in ("nord", "solarized-light"):
            d.app.theme = theme
            accent = Color.parse(d.app.available_themes[theme].accent or "")
            # The theme's accent, or the closest readable colour.
            await d.until(lambda accent=accent: near(colour(), accent))  # type: ignore[misc]
            assert d.app.theme == theme

    drive(play)


def test_a_first_question_is_at_the_top_after_a_start_page_of_any_length(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("heads")

    async def play(d: Driver) -> None:
        await d.until(lambda: d.app.page.transcript.max_scroll_y > 0)  # the first page
        await d.ask("toss a coin")
        await d.until(lambda: "toss a coin" in "\n".join(d.screen().splitlines()[:4]))
        assert "more below" not in d.screen()

    service = ScriptedModelService(choice("big", 20))
    drive(play, size=(40, 20), model_service=service, first_run=True)


def test_text_that_ends_and_begins_in_one_frame_is_complete(
    drive: Any, server: ScriptedServer
) -> None:
    gate = Gate()
    server.play(Say(["hello wor"]), gate, Say(["ld\n\nnext\n\nlast\n"]), Finish())

    async def play(d: Driver) -> None:
        await d.send("go on")
        await d.until(lambda: "hello wor" in d.screen())
        gate.opened.set()
        await d.until(lambda: "last" in d.screen())
        assert "hello world" in d.screen()

    drive(play)
