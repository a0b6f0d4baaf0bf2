"""A chat exits if its terminal is gone.

This includes losses without a signal (nohup, a lost connection, a closed multiplexer), and with
two signals (a closed window sends SIGHUP, then SIGCONT).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")


def _no_signal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _owns_the_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY)


@pytest.mark.parametrize("begins", [_no_signal, _owns_the_terminal])
def test_the_chat_leaves_when_its_terminal_does(
    tiny_model: Path, begins: Callable[[], None]
) -> None:
    master, slave = os.openpty()
    command = [
        sys.executable,
        "-m",
        "localllm",
        "chat",
        "--model",
        str(tiny_model),
        "--context",
        "512",
    ]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=begins,
    )  # fmt: skip
    os.close(slave)
    try:
        _drawn(master)
        children = psutil.Process(process.pid).children()
        assert children, "no worker"
        os.close(master)
        process.wait(timeout=30)
        gone, _ = psutil.wait_procs(children, timeout=30)
        assert len(gone) == len(children)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _drawn(master: int) -> None:
    """Wait until the chat is on the screen."""
    seen = b""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if select.select([master], [], [], 1)[0]:
            seen += os.read(master, 65536)
            # the alternate screen, and the context in the status line
            if b"\x1b[?1049h" in seen and b"512" in seen:
                return
    pytest.fail(f"the chat did not come up: {seen[-2000:]!r}")
