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
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TextIO, cast

# C0 except tab and newline, DEL, C1, and characters that change the writing direction or end a
# line.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


_FIGURES = re.compile(r"[\d.,%]+")


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


def columns_of(stream: TextIO) -> int | None:
    """The width of the terminal that `stream` writes to, or None if it writes to a file or pipe."""
    if not stream.isatty():
        return None
    return shutil.get_terminal_size().columns


def wrapped(line: str, columns: int | None) -> list[str]:
    """Divide a line into lines of at most `columns` characters (None: no limit).

    The further lines begin under the last cell of a table's row, or are indented by two more.
    """
    if columns is None or len(line) <= columns:
        return [line]
    indent = len(line) - len(line.lstrip()) + 2
    cells = [found.end() for found in re.finditer(r"(?<=\S) {2,}(?=\S)", line)]
    indent = max([start for start in cells if start <= columns // 2], default=indent)
    pieces = textwrap.wrap(
        line,
        columns,
        subsequent_indent=" " * min(indent, columns // 2),
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return pieces or [line]


class PlainOutput:
    """A text stream that writes "?" for control characters and for characters that its encoding
    lacks.

    With `wraps`, a line that is longer than the terminal is wide is divided between words.
    """

    def __init__(self, stream: TextIO, *, wraps: bool = False) -> None:
        self._stream = stream
        self._wraps = wraps
        self._within_line = False
        self.raw_write = stream.write
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):
                stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        written = _CONTROLS.sub("?", text.replace("\r\n", "\n"))
        if self._wraps and not self._within_line:
            columns = columns_of(self._stream)
            lines: list[str] = []
            for line in written.split("\n"):
                lines += wrapped(line, columns)
            written = "\n".join(lines)
        self._within_line = bool(written) and not written.endswith("\n")
        self._stream.write(written)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines. On a terminal, lines longer than it is wide are wrapped."""
    columns = columns_of(sys.stdout)
    for line in lines:
        for piece in wrapped(line, columns):
            print(piece)


def raw_write(stream: TextIO) -> Callable[[str], Any]:
    """Return a `write` function for our own escape sequences. Never pass it text from elsewhere."""
    return cast("Callable[[str], Any]", getattr(stream, "raw_write", stream.write))


class TerminalLine:
    """A line on a terminal that each `show` replaces ("" clears it). Other outputs get no text.

    `adds_lines`: for screen readers, a text is a new line, unless only its figures have changed.
    """

    adds_lines: ClassVar[bool] = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""

    def show(self, text: str) -> None:
        if text == self._shown or not self._stream.isatty():
            return
        if self.adds_lines:
            words = _FIGURES.sub("", text)
            if words and words != self._shown:
                print(plain(text), file=self._stream, flush=True)
            self._shown = words
            return
        columns = shutil.get_terminal_size().columns
        raw_write(self._stream)(f"\r\033[K{plain(text)[: columns - 1]}")
        self._stream.flush()
        self._shown = text


def _open_missing_streams() -> None:
    """Open the null device for each standard stream that the parent closed, or that does not exist.

    pythonw, cron, Windows services and `>&-` start programs this way. Without it, the next opened
    file gets the number of the stream, and other libraries write into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    # They stay open as long as the process, as the system's streams do.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


@contextmanager
def only_plain(*, wraps_stdout: bool = False) -> Iterator[None]:
    """Replace stdout and stderr with PlainOutput inside the `with` block.

    Long lines on a terminal are divided on stderr, and with `wraps_stdout` on stdout too. By
    default stdout is as printed, because commands, files and code are copied from it.
    """
    _open_missing_streams()
    stdout = sys.stdout
    stderr = sys.stderr
    sys.stdout = cast("TextIO", PlainOutput(stdout, wraps=wraps_stdout))
    sys.stderr = cast("TextIO", PlainOutput(stderr, wraps=True))
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
