"""What we print shows control characters as "?", whoever wrote them: a file's name, a header, a
hub, another server.

A name can hold sequences that a terminal obeys: to write the clipboard, to answer in our place, to
hide a line (CWE-150). Commands print through this; the few that rewrite a line of their own say so
(`raw_write`).
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

# C0 but tab and newline, DEL and C1, and the marks that turn the direction of writing or end a
# line.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """`text` as a line of several may hold it: control characters as "?", line breaks included."""
    return re.sub("[\t\n]", "?", _CONTROLS.sub("?", text))


def ascii_json(body: Any, indent: int = 2) -> str:
    """`body` as JSON in ASCII alone: the same bytes, and valid, whatever the encoding of stdout and
    of file names is."""
    return json.dumps(body, indent=indent).replace("\x7f", "\\u007f")


def is_text(word: str) -> bool:
    """False where bytes of an argument could not be read as text (Python keeps them as surrogates,
    PEP 383)."""
    return not any("\ud800" <= sign <= "\udfff" for sign in word)


class PlainOutput:
    """A text stream that writes everything but control characters; what its encoding lacks becomes
    "?" too."""

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
    """A `write` for what the terminal is to obey: our own sequences, never anything that came from
    elsewhere."""
    return cast("Callable[[str], Any]", getattr(stream, "raw_write", stream.write))


class TerminalLine:
    """One line on a terminal that the next one takes the place of, "" none; nothing elsewhere."""

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
    """stdout and stderr are PlainOutput for a while."""
    stdout = sys.stdout
    stderr = sys.stderr
    # A program without a terminal (pythonw) has None.
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
    """Let what is still held back for stdout go, where it can't be written: nothing tries again on
    the way out."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
