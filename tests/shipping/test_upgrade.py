"""A new version is installed over the old one while a chat is open. The conversation continues, and
no message is lost."""

from __future__ import annotations

import os
import select
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from shipping import wheels

pytest.importorskip("fcntl")
pytestmark = pytest.mark.long

_MODEL = "smollm2-135m-instruct"
_PATIENCE_S = 120.0


class Chat:
    """A `localllm chat` on its own terminal, with access to its stored messages."""

    def __init__(self, programs: Path, home: Path) -> None:
        self._home = home
        self._master, slave = os.openpty()
        command = [programs / "localllm", "chat", "--model", _MODEL, "--context", "2048"]
        environment = wheels.home_environment(home) | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=home,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = b""
        self._until(lambda: b"Enter sends" in self.seen)

    def ask(self, text: str) -> None:
        """Type `text` and wait until its answer is stored."""
        had = len(self.kept())
        os.write(self._master, text.encode() + b"\r")
        self._until(lambda: len(self.kept()) == had + 2 and bool(self.kept()[-1].strip()))

    def kept(self) -> list[str]:
        """Return the finished messages on the disk."""
        file = self._home / ".local" / "share" / "localllm" / "conversations.db"
        if not file.exists():
            return []
        with closing(sqlite3.connect(file)) as db:
            return [
                row[0]
                for row in db.execute("SELECT content FROM messages WHERE complete = 1 ORDER BY id")
            ]

    def worker(self) -> psutil.Process:
        """Return the process that has loaded the model."""
        [worker] = [
            p
            for p in psutil.Process(self.process.pid).children()
            if "localllm.engine.worker.worker" in p.cmdline()
        ]
        return worker

    def leave(self) -> None:
        """Quit with the keyboard shortcut, and wait for the end."""
        os.write(self._master, b"\x11")  # Ctrl+Q
        self._until(lambda: self.process.poll() is not None)

    def _until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not done():
            if time.monotonic() > end:
                pytest.fail(f"it did not come to that: {self.seen[-3000:]!r}, {self.kept()}")
            if select.select([self._master], [], [], 0.2)[0]:
                self._read()

    def _read(self) -> None:
        try:
            self.seen += os.read(self._master, 65536)
        except OSError:  # its other end is gone
            self.process.wait(_PATIENCE_S)


@contextmanager
def chat(programs: Path, home: Path) -> Iterator[Chat]:
    """A chat that is always ended after the test."""
    running = Chat(programs, home)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def test_a_conversation_continues_after_an_upgrade(tmp_path: Path) -> None:
    for name in ("old", "new", "tree", "home"):
        (tmp_path / name).mkdir()
    programs = wheels.environment(tmp_path / "env", wheels.built(wheels.ROOT, tmp_path / "old"))
    newer = wheels.built(wheels.next_version(tmp_path / "tree"), tmp_path / "new")
    home = tmp_path / "home"
    with chat(programs, home) as open_chat:
        open_chat.ask("Say one word.")
        wheels.install(programs, newer)
        said = subprocess.run(
            [programs / "localllm", "--version"], capture_output=True, text=True, check=True
        )
        assert said.stdout.strip() == "localllm 9.9.9"
        open_chat.ask("And another.")
        # A restarted worker is the new version's, and it still has the earlier messages.
        open_chat.worker().send_signal(signal.SIGKILL)
        open_chat.ask("And a last one.")
        open_chat.leave()
        assert open_chat.process.returncode == 0
        before = open_chat.kept()
    assert before[0::2] == ["Say one word.", "And another.", "And a last one."]
    with chat(programs, home) as again:
        assert again.kept() == before
        again.ask("What was first?")
        assert again.kept()[: len(before)] == before
        again.leave()
