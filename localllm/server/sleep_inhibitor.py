"""Keeps a desktop from idle sleep while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterator, Mapping

# Shorter requests end before the machine could fall asleep, so no program is started for them.
_HOLD_AFTER_S = 5.0
# Every desktop session sets one of these variables. Servers and containers have no desktop that
# suspends them.
_DESKTOP = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_CURRENT_DESKTOP")
# `cat` ends when its input is closed: after the last request, or when this process ends for any
# reason.
_UNTIL_INPUT_CLOSES = ("cat",)


def holding_command(
    platform: str, which: Callable[[str], str | None], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the command that keeps `platform` awake while its input is open. Return () if there is
    no such program, or no desktop.

    macOS: `caffeinate -i` prevents idle sleep; the display may turn off. Linux: an inhibitor lock
    of logind, which desktops check before they suspend an idle machine (systemd-inhibit(1))."""
    if platform == "darwin":
        program = which("caffeinate")
        options = ["-i"]
    elif platform == "linux" and any(environment.get(name) for name in _DESKTOP):
        program = which("systemd-inhibit")
        options = ["--what=idle", "--who=localllm", "--why=requests are being answered"]
    else:
        return ()
    if program is None:
        return ()
    return (program, *options, *_UNTIL_INPUT_CLOSES)


class SleepInhibitor:
    """Keeps the machine awake while requests run. Each request runs in a `held` block on the
    server's event loop. `command` keeps the machine awake; () disables this."""

    def __init__(self, command: tuple[str, ...], *, after_s: float = _HOLD_AFTER_S) -> None:
        self._command = command
        self._after_s = after_s
        self._running = 0
        self._inhibitor_task: asyncio.Task[None] | None = None
        # Cancelled tasks whose program has not ended. The event loop alone holds no strong
        # references to tasks.
        self._ending: set[asyncio.Task[None]] = set()

    @classmethod
    def for_this_machine(cls, *, wanted: bool) -> SleepInhibitor:
        """Return the `SleepInhibitor` of this machine. It has no effect if it is not `wanted` or
        not possible here."""
        if not wanted:
            return cls(())
        return cls(holding_command(sys.platform, shutil.which, os.environ))

    @contextlib.contextmanager
    def keep_awake(self) -> Iterator[None]:
        """Context of one request. The machine may sleep after the last request."""
        self._running += 1
        if self._command and self._inhibitor_task is None:
            self._inhibitor_task = asyncio.create_task(self._hold())
        try:
            yield
        finally:
            self._running -= 1
            if not self._running and self._inhibitor_task is not None:
                self._inhibitor_task.cancel()
                self._ending.add(self._inhibitor_task)
                self._inhibitor_task.add_done_callback(self._ending.discard)
                self._inhibitor_task = None

    async def _hold(self) -> None:
        await asyncio.sleep(self._after_s)
        with contextlib.suppress(OSError):
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
            )
            try:
                await process.wait()
            finally:
                process.stdin.close()  # type: ignore[union-attr]
                await process.wait()
