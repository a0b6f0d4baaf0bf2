"""The real program on a real terminal.

If it is killed during an answer, no text is lost. It writes no unexpected bytes.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from localllm import paths
from localllm.conversation.history import History
from tui.scripted_sse import Gate, Say, ScriptedServer

pytest.importorskip("pty")

EVIL = "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x1b[6n\x9b6n"
WITHIN_S = 60


class Terminal:
    """A chat on its own terminal. `seen` is all of its output."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        command = [sys.executable, "-m", "localllm", "chat", *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(slave)
        self.seen = b""

    def until(self, *words: bytes) -> None:
        """Read until all of `words` were written."""
        self.until_true(lambda: all(word in self.seen for word in words))

    def until_true(self, what: Callable[[], bool]) -> None:
        """Read until `what` holds."""
        end = time.monotonic() + WITHIN_S
        while not what():
            assert time.monotonic() < end, self.seen[-2000:]
            if select.select([self._master], [], [], 0.05)[0]:
                self.seen += os.read(self._master, 65536)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.killpg(self.process.pid, signal.SIGWINCH)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        if terminal.process.returncode is None:
            terminal.kill()


def stored() -> Sequence[str]:
    with History() as history:
        return [
            m.content for conversation in history.list() for m in history.messages(conversation.id)
        ]


@pytest.mark.timeout(180)
def test_a_chat_killed_during_an_answer_is_restored_when_reopened(
    server: ScriptedServer, terminals: list[Terminal]
) -> None:
    gate = Gate()
    words = [f"word{n} " for n in range(40)]
    server.play(Say([EVIL, *words, "lastword"]), gate)
    server.count = len
    first = Terminal("--url", server.base_url, "--model", "scripted")
    terminals.append(first)
    first.until(b"\x1b[?1049h", b"scripted")
    first.type(b"tell me\r")
    first.until(b"lastword")
    # it is written at most half a second after it arrives
    first.until_true(lambda: "lastword" in "".join(stored()))
    first.type(b"typed and not sent")
    first.until_true(
        lambda: (
            "typed and not sent"
            in "".join(f.read_text() for f in paths.data_dir().glob("drafts/*.txt"))
        )
    )
    first.kill()
    for foreign in (b"\x1b]0;", b"\x1b]52", b"\x1b[6n", "\x9b".encode()):
        assert foreign not in first.seen, foreign
    gate.opened.set()
    assert stored() == ["tell me", EVIL + "".join(words) + "lastword"]

    again = Terminal("--url", server.base_url, "--model", "scripted", "--continue")
    terminals.append(again)
    again.until(b"lastword", b"typed and not sent", b"/more")
    assert b"Traceback" not in first.seen + again.seen
    again.type(b"\x03\x04")  # Ctrl+D quits only if the input is empty, so Ctrl+C clears it first
    again.process.wait(timeout=WITHIN_S)
    assert again.process.returncode == 0
    assert b"\x1b]52" not in again.seen
    # the terminal is restored
    assert b"\x1b[?1049l" in again.seen or select.select([again._master], [], [], 1)[0]


@pytest.mark.timeout(180)
def test_constant_resizing_while_an_answer_streams_causes_no_error(
    server: ScriptedServer, terminals: list[Terminal]
) -> None:
    gate = Gate()
    wide = "日本語 עברית 👩‍👩‍👧‍👦 e\u0301\u0302 " * 20
    pieces = [f"| {n} | {wide} |\n" if n % 7 else f"\n\n```py\n{wide}\n```\n\n" for n in range(60)]
    server.play(Say(pieces), gate, Say(["\n\nlastword"]))
    terminal = Terminal("--url", server.base_url, "--model", "scripted")
    terminals.append(terminal)
    terminal.until(b"\x1b[?1049h", b"scripted")
    terminal.type(b"go\r")
    for n in range(120):
        terminal.resize(1 + (n * 37) % 180, 1 + (n * 13) % 60)
        if select.select([terminal._master], [], [], 0.02)[0]:
            terminal.seen += os.read(terminal._master, 65536)
    terminal.resize(100, 30)
    gate.opened.set()
    terminal.until(b"lastword")
    assert terminal.process.poll() is None
    assert b"Traceback" not in terminal.seen
    assert "".join(stored()).startswith("go")
