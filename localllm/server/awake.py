"""Keeps a desktop from falling asleep while requests run, and lets it again as soon as none
does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterator, Mapping

# Requests that are answered sooner can't be slept through: nothing is started for them.
_HOLD_AFTER_S = 5.0
# A desktop's sessions name themselves with one of these; on a server or in a container nobody dims
# a screen.
_DESKTOP = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_CURRENT_DESKTOP")
# Ends once its input does: with the last request, or with this process, however that ends.
_UNTIL_LET_GO = ("cat",)


def holding_command(
    platform: str, which: Callable[[str], str | None], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """The program that keeps `platform` awake while its input is open; () if there is no such
    program, or no desktop.

    macOS: `caffeinate -i` (no idle sleep; the display may go dark). Linux: an inhibitor of logind,
    which desktops ask before they suspend an idle machine (systemd-inhibit(1))."""
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
    return (program, *options, *_UNTIL_LET_GO)


class Awake:
    """A block of `held` for each request, on the server's event loop; `command` holds the machine
    awake (() = nothing does)."""

    def __init__(self, command: tuple[str, ...], *, after_s: float = _HOLD_AFTER_S) -> None:
        self._command = command
        self._after_s = after_s
        self._running = 0
        self._holding: asyncio.Task[None] | None = None
        # Those that were let go, until their program has ended: the event loop alone keeps no task.
        self._ending: set[asyncio.Task[None]] = set()

    @classmethod
    def here(cls, *, wanted: bool) -> Awake:
        """For this machine, where it is `wanted` and can be had."""
        if not wanted:
            return cls(())
        return cls(holding_command(sys.platform, shutil.which, os.environ))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which a request runs; after the last one the machine may sleep."""
        self._running += 1
        if self._command and self._holding is None:
            self._holding = asyncio.create_task(self._hold())
        try:
            yield
        finally:
            self._running -= 1
            if not self._running and self._holding is not None:
                self._holding.cancel()
                self._ending.add(self._holding)
                self._holding.add_done_callback(self._ending.discard)
                self._holding = None

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
