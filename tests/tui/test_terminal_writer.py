"""Frames reach the terminal in order: short ones at once, the others through a thread."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, NamedTuple

import pytest

from localllm_tui.terminal_writer import TerminalWriter

pytest.importorskip("termios")
FRAME = "x" * 20_000


class Pair(NamedTuple):
    """A pseudo terminal: its window, and the file of the program in it."""

    window: IO[bytes]
    file: IO[str]

    def received(self, n_chars: int) -> str:
        """Return what arrives within 10 seconds, at most `n_chars` characters."""
        read = b""
        while len(read) < n_chars and select.select([self.window], [], [], 10)[0]:
            read += self.window.read(n_chars - len(read))
        return read.decode()


@pytest.fixture
def terminal() -> Iterator[Pair]:
    window, program = os.openpty()
    # Without a window, unwritten text is an error.
    with (
        open(window, "rb", buffering=0) as opened,
        suppress(OSError),
        open(program, "w", encoding="utf-8") as file,
    ):
        yield Pair(opened, file)


def test_a_short_frame_is_written_without_the_thread(terminal: Pair) -> None:
    TerminalWriter(terminal.file).write("a key")
    assert terminal.received(5) == "a key"


def test_a_short_frame_does_not_overtake_a_long_one(terminal: Pair) -> None:
    """A terminal that does not read never blocks the chat, which goes on to write."""
    writer = TerminalWriter(terminal.file)
    writer.start()
    writer.write(FRAME)
    for n in range(10):
        writer.write(f"<{n}>")
    wanted = FRAME + "".join(f"<{n}>" for n in range(10))
    assert terminal.received(len(wanted)) == wanted
    writer.stop()


def test_a_closed_terminal_raises_no_error(terminal: Pair) -> None:
    writer = TerminalWriter(terminal.file)
    terminal.window.close()
    writer.write("a key")
    with pytest.raises(OSError, match="rror"):
        terminal.file.flush()
