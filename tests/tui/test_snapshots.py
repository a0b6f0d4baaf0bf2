"""Snapshots of every screen as text in `snapshots/`.

Light themes, NO_COLOR and sixteen colours show the same text.

A snapshot is the screen's text, followed by one letter for each cell. A legend gives the style
of each letter. UPDATE_SNAPSHOTS=1 writes them again; check the difference before you commit.
Textual draws differently from version to version. With another version than the snapshots', only
the text is compared.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import textual
from rich.cells import cell_len
from rich.color import ColorType
from rich.style import Style
from textual.color import Color
from textual.command import CommandPalette
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input

from localllm.conversation.history import History
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.interfaces import EngineProgress, InstalledModel
from localllm_tui.control.meter import AnswerMeter
from localllm_tui.control.session import Session
from localllm_tui.screens.dialogs import Approval, HelpScreen
from localllm_tui.screens.models import ModelsScreen
from localllm_tui.screens.picker import ConversationPicker
from localllm_tui.screens.picking import QuestionPicker
from localllm_tui.widgets.contrast import READABLE, contrast
from localllm_tui.widgets.file_menu import FileMenu
from tui.conftest import Driver
from tui.pictures import PICTURES, pictures
from tui.scripted_models import ScriptedModelService, choice
from tui.scripted_sse import Finish, Gate, Say, ScriptedServer
from tui.test_glass import PHYSICS, TIMINGS
from tui.test_loading import Engine
from tui.test_tools import Host, asks

FOLDER = Path(__file__).parent / "snapshots"
DRAWN_WITH = "8.2.8"
SIZES = [(40, 20), (80, 24), (120, 40), (200, 60)]
LOOKS = ["dark", "light", "nocolor", "sixteen"]
CODE = "```python\nfrom pathlib import Path\ntext = Path('notes.txt').read_text()\n```"
MODELS = [{"id": "scripted", "object": "model", "context_length": 8192, "physics": PHYSICS}]
# Characters that are not text: frames, bars, knobs and scrollbars.
DECORATION = re.compile(r"[\s─-▟▁-▏■-◿⎯]")


def conversation(history: History) -> str:
    """Store a conversation with versions, reasoning, code, wide text and a stopped answer.

    Returns its id.
    """
    session = Session(history, "scripted", system="Answer briefly.")
    session.ask("How do I read a file in Python?")
    for text, thought in (
        ("Use `open`.", ""),
        (f"Use `pathlib`:\n\n{CODE}\n\nIt closes the file.", "Short, please."),
    ):
        answer = PendingAnswer(session)
        answer.add(text, thought)
        answer.finish(
            {
                "finish_reason": "stop",
                "prompt_tokens": 40,
                "completion_tokens": 30,
                "tok_s": 21.3,
                "ttft_s": 0.4,
            }
        )
    session.ask("And 日本語 or שלום, with 👩‍🚀?")
    answer = PendingAnswer(session)
    answer.add("UTF-8 holds **all** of it:\n\n- 日本語\n- שלום\n- 👩‍🚀")
    answer.finish(
        {
            "finish_reason": "stopped",
            "prompt_tokens": 100,
            "completion_tokens": 25,
            "tok_s": 20.1,
            "ttft_s": 0.3,
        }
    )
    assert session.id is not None
    return session.id


def of_four_tokens() -> AnswerMeter:
    """Return a meter with the same values on every machine: 20 tokens/s, the first after 0.4 s."""
    times = iter([0.0, 0.4, 0.45, 0.5, 0.55])
    meter = AnswerMeter(lambda: next(times))
    for _ in range(4):
        meter.delta()
    meter.prompt_tokens = 24
    return meter


def cells(d: Driver) -> Iterator[tuple[int, int, str, Style]]:
    """Yield every character on screen as (line, column, character, style)."""
    for y, strip in enumerate(d.strips()):
        x = 0
        for text, style, _ in strip:
            for letter in text:
                yield y, x, letter, style or Style()
                x += cell_len(letter)


def picture(d: Driver) -> tuple[str, str]:
    """Return the screen's text, and its styles: one letter per cell, with a legend."""
    texts, looks = [""] * d.app.size.height, [""] * d.app.size.height
    letters: dict[str, str] = {}
    for y, _, letter, style in cells(d):
        shown = (
            str(Style.parse(str(style.without_color)).without_color) if style.without_color else ""
        )
        said = f"{shown} {_hex(style.color)} on {_hex(style.bgcolor)}"
        mark = letters.setdefault(
            said,
            chr(ord("a") + len(letters))
            if len(letters) < 26
            else chr(ord("A") + len(letters) - 26),
        )
        texts[y] += letter
        looks[y] += mark * cell_len(letter)
    # Most of the screen has the style of its last cell, so that letter is omitted at the ends of
    # lines.
    legend = "\n".join(f"{mark} = {said.strip()}" for said, mark in letters.items())
    ground = looks[-1][-1]
    text = re.sub(
        r"\d\d [A-Z][a-z]{2} 20\d\d, \d\d:(?:\d\d|(…))",
        r"26 Nov 2026, 10:00\1",
        "\n".join(t.rstrip() for t in texts),
    )
    styles = "\n".join(look.rstrip(ground) for look in looks)
    return text, f"{styles}\n{legend}\nground = {ground}"


def _hex(colour: Any) -> str:
    return "default" if colour is None or colour.is_default else str(colour.name)


async def hold(d: Driver, name: str, look: str) -> None:
    """Compare the screen with its snapshot.

    Looks other than "dark" are checked by their own rules.
    """
    await d.until(lambda: d.app.focused is not None and d.app.focused.has_focus)
    for box in d.app.screen.query(Input):
        box.cursor_blink = False
    d.app.page.composer.cursor_blink = False
    # A line drawn in the dark half of a blink is cached under the same key as one without blinking.
    d.app.page.composer.notify_style_update()
    size = f"{d.app.size.width}x{d.app.size.height}"
    file, light = FOLDER / f"{name}-{size}.txt", FOLDER / f"{name}-{size}-light.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        now, before = picture(d), ("", "")
        while now != before:
            for _ in range(20):
                await d.pilot.pause()
            now, before = picture(d), now
        FOLDER.mkdir(exist_ok=True)
        if look == "dark":
            file.write_text("\n\n".join(now) + "\n", encoding="utf-8")
        if look == "light":
            light.write_text(f"{now[1]}\n", encoding="utf-8")
        return
    kept = file.read_text(encoding="utf-8")
    exactly = textual.__version__ == DRAWN_WITH
    kept_light = light.read_text(encoding="utf-8") if look == "light" else ""

    def same() -> bool:
        text, styles = picture(d)
        if exactly and look == "dark":
            return kept == f"{text}\n\n{styles}\n"
        if exactly and look == "light" and kept_light != f"{styles}\n":
            return False
        return _without_scrollbars(kept).startswith(_without_scrollbars(text))

    with suppress(TimeoutError):
        await d.until(same)
    if not same():
        pytest.fail(
            f"{file.name} looks otherwise in {look}: UPDATE_SNAPSHOTS=1 draws it "
            f"anew\n{picture(d)[0]}\n--- "
            f"not\n{kept}"
        )
    _check_look(d, look)


def _without_scrollbars(text: str) -> str:
    """Remove scrollbars: their ends are drawn to an eighth of a cell, except with sixteen
    colours."""
    return re.sub(r" *[▁-▇]?$", "", text, flags=re.MULTILINE)


def _check_look(d: Driver, look: str) -> None:
    seen = [*cells(d)]
    if look == "nocolor":
        assert {_hex(c) for _, _, _, style in seen for c in (style.color, style.bgcolor)} == {
            "default"
        }
    elif look == "sixteen":
        kinds = {
            c.type for _, _, _, style in seen for c in (style.color, style.bgcolor) if c is not None
        }
        assert kinds <= {ColorType.STANDARD, ColorType.DEFAULT}
    else:
        dialog = (
            d.app.screen.children[0].region
            if isinstance(d.app.screen, ModalScreen)
            else d.app.screen.region
        )
        # The palette's list is outside its first child.
        regions = [dialog, *(w.region for w in d.app.screen.query("CommandList") if w.display)]
        dim = [
            letter
            for y, x, letter, style in seen
            if any(region.contains(x, y) for region in regions)
            and not DECORATION.match(letter)
            and style.color
            and style.bgcolor
            if contrast(Color.from_rich_color(style.color), Color.from_rich_color(style.bgcolor))
            < READABLE - 0.05
        ]
        assert dim == [], f"can't be read: {''.join(dim)}"
        return
    focused = d.app.focused
    lists = [w.region for w in d.app.screen.query("OptionList") if w.region.height and w.display]
    for where in (
        [focused.region, *lists] if focused is not None and focused.region.height else lists
    ):
        marked = [
            s
            for y, x, _, s in seen
            if where.contains(x, y) and (s.reverse or _hex(s.bgcolor) != "default")
        ]
        assert marked or isinstance(focused, VerticalScroll), f"no cursor is to be seen in {where}"


# The narrow size that wraps all text, the usual one, and the look that uses only attributes.
QUICK = [((40, 20), "dark"), ((80, 24), "dark"), ((80, 24), "nocolor")]
CASES = [
    pytest.param(size, look, marks=[] if (size, look) in QUICK else pytest.mark.long)
    for size in SIZES
    for look in LOOKS
]


@pytest.mark.parametrize(("size", "look"), CASES)
def test_every_screen_matches_its_snapshot(
    drive: Any,
    history: History,
    connections: list[sqlite3.Connection],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    size: tuple[int, int],
    look: str,
) -> None:
    if look == "nocolor":
        monkeypatch.setenv("NO_COLOR", "1")
    if look == "sixteen":
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("COLORTERM")
    service = ScriptedModelService(
        choice("qwen3-8b", 6.2),
        choice("gemma-4-12b", 9.1),
        choice("granite", 3.3, installed="granite"),
        choice("tiny", 0.3),
        disk=[InstalledModel("old", "Q8", 2_000_000_000, "Ollama", "/ollama/old.gguf", False)],
    )
    files = tmp_path / "project"
    files.mkdir()
    for name in ("notes.txt", "plan.md", "report.md"):
        (files / name).write_text(f"What {name} holds.")
    monkeypatch.chdir(files)
    talk = conversation(history)
    engine, gate = Engine(), Gate()
    engine.now = EngineProgress()
    with history.transaction() as db:
        db.execute("UPDATE conversations SET updated_s = ?", (time.time() - 3 * 3600,))

    async def play(d: Driver) -> None:
        if look == "light":
            d.app.theme = "textual-light"
        await d.until(lambda: d.app.chat.listed.n_ctx is not None and "QWEN3-8B" in d.screen())
        await hold(d, "first-run", look)
        await d.press("f4")
        await d.until(
            lambda: (
                isinstance(d.app.screen, ModelsScreen) and bool(d.app.screen.rows.planned.choices)
            )
        )
        await d.press("down", "down")
        await hold(d, "models", look)
        await d.press("w")
        await d.until(lambda: "the arithmetic of" in d.screen())
        await hold(d, "why", look)
        await d.press("escape", "d")
        await d.until(lambda: "takes 1.0 of" in d.screen())
        await hold(d, "disk", look)
        await d.press("escape", "f1")
        await d.until(lambda: isinstance(d.app.screen, HelpScreen))
        await hold(d, "help", look)
        await d.press("escape", *"/mo", "down")
        await hold(d, "menu", look)
        await d.press("ctrl+u", "ctrl+p")
        await d.until(lambda: isinstance(d.app.screen, CommandPalette) and "Branch" in d.screen())
        await hold(d, "palette", look)
        await d.press("escape", "ctrl+o")
        await d.until(lambda: isinstance(d.app.screen, ConversationPicker))
        await hold(d, "conversations", look)
        await d.press("enter")
        await d.until(lambda: d.app.chat.session.id == talk)
        await hold(d, "conversation", look)
        await d.press("ctrl+f", *"file")
        await hold(d, "find", look)
        await d.press("enter")
        await d.until(lambda: "N next" in d.screen())
        await hold(d, "found", look)
        await d.press("escape")
        await d.send("/new")
        await d.ask("How fast is this machine?")
        await d.send("/continue")
        await d.until(lambda: d.app.chat.session.id == talk)
        await d.press("f3")
        await hold(d, "glass", look)
        await d.press("f3", "ctrl+r")
        await d.until(lambda: isinstance(d.app.screen, QuestionPicker))
        await hold(d, "asked", look)
        await d.press("escape", "@")
        await d.until(lambda: not isinstance(d.app.screen, QuestionPicker))
        await d.until(lambda: d.app.page.query_one(FileMenu).option_count == 3)
        await d.until(lambda: d.screen().count(" tokens") >= 3)
        await d.until(lambda: " in total" in str(d.app.page.composer.border_title))
        await hold(d, "files", look)
        await d.press("escape", "ctrl+u")
        await d.until(lambda: not d.app.page.query_one(FileMenu).display)
        await d.send("/model nosuch")
        await d.until(lambda: "has no model" in d.screen())
        await hold(d, "error", look)
        await d.send("/tools on")
        await d.send("what time is it?")
        await d.until(lambda: isinstance(d.app.screen, Approval))
        await hold(d, "approval", look)
        await d.press("n")
        await d.until(lambda: not d.app.chat.answering)
        await d.send("/tools off")
        await d.send("/new")
        engine.now = EngineProgress("loading", 0.42)
        await d.send("Which rivers are long?")
        await d.until(lambda: "loading scripted 42%…" in d.screen())
        await hold(d, "loading", look)
        engine.now = EngineProgress()
        await d.until(lambda: "Amazon" in d.screen())
        assert d.app.chat.stream is not None
        d.app.chat.stream.meter = of_four_tokens()
        await hold(d, "streaming", look)
        gate.opened.set()
        await d.until(lambda: not d.app.chat.answering)
        assert len(server.requests) == 4

    with ScriptedServer(models=MODELS) as server:
        server.count = lambda text: len(text.split())
        server.play(Say(["Quick ", "enough."]), Finish(usage=(950, 101, 750), timings=TIMINGS))
        server.play(*asks())
        server.answer("ok")
        server.play(
            Say(["The longest are:\n\n", "1. the **Nile**\n", "2. the **Amazon**\n", "3. the"]),
            gate,
            Finish(),
        )
        drive(
            play,
            engine=engine,
            tools=(Host(),),
            model_service=service,
            first_run=True,
            size=size,
            server_=server,
        )


def test_the_pictures_of_the_docs_match_the_screens() -> None:
    drawn = pictures()
    assert {*PICTURES.glob("*.svg")} == drawn.keys(), "python -m tui.pictures draws them anew"
    for path, svg in drawn.items():
        assert path.read_text(encoding="utf-8") == svg, f"{path.name}: draw it anew"
