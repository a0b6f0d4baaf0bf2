"""Small pictures of the images that go with a question, in terminals that draw pictures, where the
extra `thumbnails` is installed."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from textual.app import SuspendNotSupported
from textual.containers import Horizontal
from textual.widget import Widget

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# What the worker decodes at most (engine/vision.py): more is refused there anyway.
_MOST_PIXELS = 40 * 10**6
# More than a terminal shows in so few lines.
_SIDE_PX = 480
_MOST = 4

# The widget class that draws pictures here; None: names are shown instead.
drawing: type[Widget] | None = None
asked = False


def possible() -> bool:
    """Whether pictures may be drawn here, which the terminal says when there is one."""
    return drawing is not None or (
        not asked and importlib.util.find_spec("textual_image") is not None
    )


def prepare() -> None:
    """Ask the terminal whether it draws pictures (Sixel, or Kitty's protocol). Not while the screen
    is open: then the terminal's answers would be taken for keys."""
    global drawing, asked
    asked = True
    # Its log would be written over the screen.
    logging.getLogger("textual_image").addHandler(logging.NullHandler())
    logging.getLogger("textual_image").propagate = False
    try:
        from textual_image import renderable, widget
    except Exception:  # not installed, or an unexpected answer of the terminal
        return
    drawn = (renderable.SixelImage, renderable.TGPImage)
    drawing = widget.Image if renderable.Image in drawn else None


class Thumbnails(Horizontal):
    """The first of some images, each given as a data URL."""

    DEFAULT_CSS = """
    Thumbnails { height: auto; width: 1fr; }
    Thumbnails > * { height: 8; width: auto; margin-right: 2; }
    """

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__()
        self._urls = urls[:_MOST]

    def on_mount(self) -> None:
        self.run_worker(self._draw())

    async def _draw(self) -> None:
        if drawing is None and not asked:
            # With the first picture, not with the start: what knows of terminals takes a third of a
            # second to load, and waits for those that do not answer.
            with suppress(SuspendNotSupported), self.app.suspend():
                prepare()
        if drawing is None:
            self.remove()
            return
        for url in self._urls:
            picture = await asyncio.to_thread(small, url)
            # Named in the line above; what is no picture after all stays words.
            if picture is not None and drawing is not None and self.is_mounted:
                made: Any = drawing
                await self.mount(made(picture))


def small(url: str) -> Image | None:
    """The picture of a data URL, small; None for what is none, or too large."""
    from PIL import Image, ImageOps

    try:
        data = base64.b64decode(url.partition(",")[2], validate=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
                if opened.width * opened.height > _MOST_PIXELS:
                    return None
                opened.draft("RGB", (_SIDE_PX, _SIDE_PX))
                opened.thumbnail((_SIDE_PX, _SIDE_PX))
                return ImageOps.exif_transpose(opened).convert("RGBA")
    except Exception:  # Pillow's decoders raise whatever a damaged file leads them to
        return None
