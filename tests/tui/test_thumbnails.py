"""Attached images as small pictures: where the terminal draws them, and words everywhere else."""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.widgets import Static

from localllm_tui.control.attachments import data_url, read_text
from localllm_tui.widgets import thumbnails
from localllm_tui.widgets.thumbnails import Thumbnails, small
from support.pictures import needs_pillow, png

pytestmark = needs_pillow()
installed = importlib.util.find_spec("textual_image") is not None
needs_extra = pytest.mark.skipif(
    not installed, reason="textual-image is not installed (the extra thumbnails)"
)


def test_a_picture_is_made_small_and_what_is_none_is_left() -> None:
    made = small(data_url(png(1600, 800, 1)))
    assert made is not None
    assert made.size == (480, 240)
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (400, 100)).save(file, "JPEG", exif=exif)
    turned = small(data_url(file.getvalue()))
    assert turned is not None
    assert turned.size == (100, 400)
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")
    for data in (bomb.getvalue(), png(64, 64, 1)[:200], b"<svg/>", b""):
        assert small("data:image/png;base64," + base64.b64encode(data).decode()) is None


# What the screen's size and two questions are answered with: Device Attributes (4 is Sixel), and
# Kitty's about a picture.
TERMINALS = {"sixel": ("62;4", False), "kitty": ("62", True), "neither": ("62", False)}


@needs_extra
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize("kind", TERMINALS)
def test_the_terminal_is_asked_what_it_draws(kind: str) -> None:
    drawn = {
        "sixel": "textual_image.widget.sixel",
        "kitty": "textual_image.widget",
        "neither": "None",
    }[kind]
    # It waits for an answer for a tenth of a second only, which a machine with other work may miss.
    assert any(_drawn_by(kind) == drawn for _ in range(8))


def _drawn_by(kind: str) -> str:
    import fcntl
    import pty
    import termios

    attributes, draws = TERMINALS[kind]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 800, 480))
    code = (
        "from localllm_tui.widgets import thumbnails as t; t.prepare(); print('drawn by', "
        "t.drawing and t.drawing.__module__)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL
    ):
        os.close(theirs)
        said = b""
        while b"drawn by" not in said or not said.endswith(b"\n"):
            new = os.read(ours, 4096)
            said += new
            if b"\x1b[c" in new:
                os.write(ours, f"\x1b[?{attributes}c".encode())
            found = re.search(rb"_Gi=(\d+)", new)
            if found and draws:
                os.write(ours, b"\x1b_Gi=" + found[1] + b";OK\x1b\\")
    os.close(ours)
    return said.decode().rpartition("drawn by ")[2].strip()


def _ask(drive: Any, shot: Path, seen: list[Any]) -> None:
    async def play(d: Any) -> None:
        await d.ask("what is wrong here?")
        assert "attached: shot.png" in d.screen()
        await d.until(lambda: all(view.children for view in d.app.query(Thumbnails)))
        seen.extend(child for view in d.app.query(Thumbnails) for child in view.children)

    drive(play, attach=[read_text(shot)])


def test_without_the_extra_or_such_a_terminal_words_stand_there(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thumbnails, "drawing", None)
    thumbnails.prepare()  # a test's output is no terminal that draws
    assert thumbnails.drawing is None
    shot = tmp_path / "shot.png"
    shot.write_bytes(png(64, 64, 1))
    seen: list[Any] = []
    _ask(drive, shot, seen)
    assert seen == []


def test_the_terminal_is_asked_with_the_first_picture_while_the_screen_is_closed(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    @contextmanager
    def suspended(_: App[None]) -> Iterator[None]:
        asked.append("closed")
        yield
        asked.append("open")

    def prepare() -> None:
        asked.append("asked")
        monkeypatch.setattr(thumbnails, "asked", True)

    monkeypatch.setattr(thumbnails, "drawing", None)
    monkeypatch.setattr(thumbnails, "asked", False)
    monkeypatch.setattr(thumbnails, "prepare", prepare)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(App, "suspend", suspended)
    shot = tmp_path / "shot.png"
    shot.write_bytes(png(64, 64, 1))

    async def play(d: Any) -> None:
        await d.ask("no picture")
        assert asked == []
        for _ in range(2):
            d.app.chat.attach(*read_text(shot))
            await d.ask("and now?")
            await d.until(lambda: not d.app.query(Thumbnails))
            assert asked == ["closed", "asked", "open"]

    drive(play)


def test_where_pictures_are_drawn_each_image_is_one(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drawn(Static):
        """Stands for the extra's widget: it gets a picture."""

        def __init__(self, picture: Any) -> None:
            super().__init__(f"{picture.width} × {picture.height}")
            self.size_px = picture.size

    monkeypatch.setattr(thumbnails, "drawing", Drawn)
    shot = tmp_path / "shot.png"
    shot.write_bytes(png(960, 480, 1))
    seen: list[Any] = []
    _ask(drive, shot, seen)
    assert [view.size_px for view in seen] == [(480, 240)]


# What it calls of Pillow goes with Pillow 14, which pyproject.toml does not allow yet.
@pytest.mark.filterwarnings("ignore:Image.Image.getdata")
@needs_extra
def test_the_extra_s_own_widget_draws_one(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from textual_image.widget import SixelImage

    monkeypatch.setattr(thumbnails, "drawing", SixelImage)
    shot = tmp_path / "shot.png"
    shot.write_bytes(png(96, 96, 1))
    seen: list[Any] = []
    _ask(drive, shot, seen)
    assert [type(view) for view in seen] == [SixelImage]
