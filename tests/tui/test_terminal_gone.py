"""A chat whose terminal is gone leaves, also when no signal says so (nohup, a lost connection, a closed multiplexer)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("pty")


def test_the_chat_leaves_when_its_terminal_does(tiny_model: Path) -> None:
    master, slave = os.openpty()
    command = [sys.executable, "-m", "localllm", "chat", "--model", str(tiny_model), "--context", "512"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, "TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
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
            if b"\x1b[?1049h" in seen and b"512" in seen:  # the other screen, and the context in the status line
                return
    pytest.fail(f"the chat did not come up: {seen[-2000:]!r}")
