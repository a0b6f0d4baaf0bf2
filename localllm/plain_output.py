"""Print control characters as "?", from any source: file names, headers, a hub, another server.

A name can contain escape sequences that a terminal executes: they can write the clipboard, inject
input or hide a line (CWE-150). Commands print through this module. The few that rewrite a line on
the terminal use `raw_write`.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# C0 except tab and newline, DEL, C1, and characters that change the writing direction or end a
# line.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Replace control characters in `text`, including line breaks and tabs, with "?"."""
    return re.sub("[\t\n]", "?", _CONTROLS.sub("?", text))


def ascii_json(body: Any, indent: int = 2) -> str:
    """Format `body` as ASCII-only JSON.

    The bytes are the same for every encoding of stdout and of file names.
    """
    return json.dumps(body, indent=indent).replace("\x7f", "\\u007f")


def is_text(word: str) -> bool:
    """Return False if an argument contained bytes that are no text. Python keeps them as surrogates
    (PEP 383)."""
    return not any("\ud800" <= sign <= "\udfff" for sign in word)


class PlainOutput:
    """A text stream that writes "?" for control characters and for characters that its encoding
    lacks.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.raw_write = stream.write
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):
                stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        self._stream.write(_CONTROLS.sub("?", text.replace("\r\n", "\n")))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def raw_write(stream: TextIO) -> Callable[[str], Any]:
    """Return a `write` function for our own escape sequences. Never pass it text from elsewhere."""
    return cast("Callable[[str], Any]", getattr(stream, "raw_write", stream.write))


class TerminalLine:
    """A line on a terminal that each `show` replaces ("" clears it). Other outputs get no text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""

    def show(self, text: str) -> None:
        if text == self._shown or not self._stream.isatty():
            return
        raw_write(self._stream)(f"\r\033[K{plain(text)}")
        self._stream.flush()
        self._shown = text


@contextmanager
def only_plain() -> Iterator[None]:
    """Replace stdout and stderr with PlainOutput inside the `with` block."""
    stdout = sys.stdout
    stderr = sys.stderr
    # In a program without a terminal (pythonw) it is None.
    if stdout is not None:
        sys.stdout = cast("TextIO", PlainOutput(stdout))
    if stderr is not None:
        sys.stderr = cast("TextIO", PlainOutput(stderr))
    try:
        yield
    finally:
        sys.stdout = stdout
        sys.stderr = stderr


def give_up_stdout() -> None:
    """Discard buffered output if stdout can't be written, so that Python does not retry at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
