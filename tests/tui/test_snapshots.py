"""What the screens look like, as SVG pictures in `snapshots/`, at the four sizes that must work.

UPDATE_SNAPSHOTS=1 draws them anew; look at them before they are kept. Textual draws a little differently from version to
version: with another one than they were drawn with the text alone is compared.
"""

from __future__ import annotations

import html
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import textual

from localllm.conversation.history import History
from localllm_tui.control.session import Session
from localllm_tui.screens.dialogs import HelpScreen, ToolApproval
from localllm_tui.screens.models import ModelsScreen
from tui.conftest import Driver
from tui.scripted_models import ScriptedModelService, choice
from tui.scripted_sse import ScriptedServer
from tui.test_glass import PHYSICS
from tui.test_tools import Host, asks

FOLDER = Path(__file__).parent / "snapshots"
DRAWN_WITH = "8.2.8"
SIZES = [(60, 20), (80, 24), (120, 40), (160, 50)]
CODE = "```python\nfrom pathlib import Path\ntext = Path('notes.txt').read_text()\n```"


def conversation(history: History) -> str:
    """A conversation with versions, thinking, code, wide text and a stopped answer; its id."""
    session = Session(history, "scripted", system="Answer briefly.")
    session.ask("How do I read a file in Python?")
    for text, thought in (("Use `open`.", ""), (f"Use `pathlib`:\n\n{CODE}\n\nIt closes the file.", "Short, please.")):
        answer = session.answer()
        answer.add(text, thought)
        answer.finish(
            {"finish_reason": "stop", "prompt_tokens": 40, "completion_tokens": 30, "tok_s": 21.3, "ttft_s": 0.4}
        )
    session.ask("And 日本語 or שלום, with 👩‍🚀?")
    answer = session.answer()
    answer.add("UTF-8 holds **all** of it:\n\n- 日本語\n- שלום\n- 👩‍🚀")
    answer.finish(
        {"finish_reason": "stopped", "prompt_tokens": 100, "completion_tokens": 25, "tok_s": 20.1, "ttft_s": 0.3}
    )
    assert session.id is not None
    return session.id


async def compare(d: Driver, name: str) -> None:
    """Hold the screen against its picture: it comes to look so, or the difference is told."""
    d.app.chat.composer.show_cursor = False  # it blinks
    file = FOLDER / f"{name}-{d.app.size.width}x{d.app.size.height}.svg"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        drawn, before = _drawn(d), ""
        while drawn != before:
            for _ in range(20):
                await d.pilot.pause()
            drawn, before = _drawn(d), drawn
        FOLDER.mkdir(exist_ok=True)
        file.write_text(drawn, encoding="utf-8")
        return
    kept = file.read_text(encoding="utf-8")
    exactly = textual.__version__ == DRAWN_WITH
    with suppress(TimeoutError):
        await d.until(lambda: _drawn(d) == kept if exactly else _text(_drawn(d)) == _text(kept))
    assert _text(_drawn(d)) == _text(kept), f"{file.name} says something else: UPDATE_SNAPSHOTS=1 draws it anew"
    assert not exactly or _drawn(d) == kept, f"{file.name} looks otherwise: UPDATE_SNAPSHOTS=1 draws it anew"


def _drawn(d: Driver) -> str:
    drawn = re.sub(r"terminal-\d+", "terminal", d.app.export_screenshot(simplify=True))
    return re.sub(r"<style>.*?</style>", _colours, drawn, count=1, flags=re.DOTALL)


def _colours(found: re.Match[str]) -> str:
    """The style without the fonts, which are fetched from elsewhere."""
    return re.sub(r"@font-face \{.*?\}\s*", "", found[0], flags=re.DOTALL)


def _text(svg: str) -> list[str]:
    """The lines of a picture's text, without where each piece stands."""
    lines: dict[float, list[str]] = {}
    for y, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>(.*?)</text>', svg, re.DOTALL):
        lines.setdefault(float(y), []).append(html.unescape(text).replace("\xa0", " "))
    return ["".join(lines[y]).rstrip() for y in sorted(lines)]


@pytest.mark.parametrize("size", SIZES)
def test_a_conversation_and_what_a_token_costs(drive: Any, history: History, size: tuple[int, int]) -> None:
    models = [{"id": "scripted", "object": "model", "context_length": 8192, "physics": PHYSICS}]

    async def play(d: Driver) -> None:
        await d.until(lambda: d.app.chat.n_ctx is not None)
        await compare(d, "conversation")
        await d.press("f3")
        await compare(d, "glass")
        assert d.app.chat.n_ctx == 8192

    with ScriptedServer(models=models) as server:
        drive(play, resume=conversation(history), size=size, server_=server)


@pytest.mark.parametrize("size", SIZES)
def test_the_models_and_the_first_run(drive: Any, size: tuple[int, int]) -> None:
    service = ScriptedModelService(
        choice("qwen3-8b", 6.2),
        choice("gemma-4-12b", 9.1),
        choice("granite", 3.3, installed="granite"),
        choice("tiny", 0.3),
    )

    async def play(d: Driver) -> None:
        await d.until(lambda: "QWEN3-8B" in d.screen())
        await compare(d, "first-run")
        await d.press("f4")
        await d.until(lambda: isinstance(d.app.screen, ModelsScreen) and bool(d.app.screen.choices))
        await d.press("right", "right", "down")
        await d.until(lambda: not d.app.screen.planning)  # type: ignore[attr-defined]
        await compare(d, "models")
        assert len(d.app.screen.choices) == 4  # type: ignore[attr-defined]

    drive(play, model_service=service, first_run=True, size=size)


@pytest.mark.parametrize("size", SIZES)
def test_help_and_a_tool_that_asks(drive: Any, server: ScriptedServer, size: tuple[int, int]) -> None:
    server.play(*asks())
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.press("f1")
        await d.until(lambda: isinstance(d.app.screen, HelpScreen))
        await compare(d, "help")
        await d.press("escape")
        await d.send("/tools on")
        await d.send("what time is it?")
        await d.until(lambda: isinstance(d.app.screen, ToolApproval))
        await compare(d, "approval")
        await d.press("n")
        await d.until(lambda: not d.app.chat.answering)
        assert len(server.requests) == 2

    drive(play, tools=(Host(),), size=size)
