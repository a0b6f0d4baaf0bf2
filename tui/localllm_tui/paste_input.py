"""Read pastes whole: all text between the marks of a bracketed paste is text, whatever it contains.

Textual 8.2.8 ends a paste at its first ESC and reads the rest as keys. Its drivers also end the
chat at a byte that is not UTF-8. `install` replaces both in the driver's module.
"""

from __future__ import annotations

import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from textual import events
from textual._xterm_parser import XTermParser
from textual.driver import Driver
from textual.message import Message

# https://invisible-island.net/xterm/ctlseqs/ctlseqs.html, Bracketed Paste Mode
_START = "\x1b[200~"
_END = "\x1b[201~"
_DROPPED = str.maketrans("", "", "\x00\x1b")


def install(driver: type[Driver]) -> None:
    """Let a driver of Textual read input with PasteParser and without errors of decoding."""
    names = vars(sys.modules[driver.__module__])
    if "XTermParser" in names:
        names["XTermParser"] = PasteParser
        names["getincrementaldecoder"] = _lenient_decoder


def _lenient_decoder(encoding: str) -> Callable[[], Any]:
    return partial(getincrementaldecoder(encoding), errors="replace")


class PasteParser(XTermParser):
    """Textual's parser of terminal input, which this class gives no paste to read."""

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._last_chars = ""  # fed outside a paste: the start mark may come in pieces
        self._gave_up = False  # the parser has read the beginning of a mark as keys
        self._pasted: list[str] | None = None  # None: outside a paste
        self._rest = ""  # of a paste: it may be the beginning of the end mark
        self._needs_end = False  # the parser has read the start mark, too

    def tick(self) -> Iterable[Message]:
        for message in super().tick():
            self._gave_up = True
            yield message

    def feed(self, data: str) -> Iterable[Message]:
        if not data:
            yield from super().feed(data)
        elif self._pasted is None:
            yield from self._feed_keys(data)
        else:
            yield from self._feed_paste(data)

    def _feed_keys(self, data: str) -> Iterable[Message]:
        n_seen = len(self._last_chars)
        begin = (self._last_chars + data).find(_START)
        if begin < 0:
            self._last_chars = (self._last_chars + data)[1 - len(_START) :]
            self._gave_up = False
            yield from super().feed(data)
            return
        self._pasted = []
        self._last_chars = ""
        after_mark = begin + len(_START) - n_seen
        if begin > n_seen:
            yield from super().feed(data[: begin - n_seen])
        elif begin < n_seen and not self._gave_up:
            self._needs_end = True
            yield from super().feed(data[:after_mark])
        self._gave_up = False
        yield from self._feed_paste(data[after_mark:])

    def _feed_paste(self, data: str) -> Iterable[Message]:
        pasted = self._pasted or []
        self._pasted = pasted
        data = self._rest + data
        text, mark, keys = data.partition(_END)
        if not mark:
            n_pending = max(0, len(data) - len(_END) + 1)
            self._rest = data[n_pending:]
            pasted.append(data[:n_pending])
            return
        self._rest = ""
        self._pasted = None
        if self._needs_end:
            self._needs_end = False
            for message in super().feed(_END):
                if not isinstance(message, events.Paste):
                    yield message
        yield events.Paste("".join([*pasted, text]).translate(_DROPPED))
        if keys:
            yield from self.feed(keys)
