"""The output of a shell command on this machine, limited in time and length, as an attachment of a
question."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import suppress

from localllm.errors import UsageError
from localllm_tui.control.terminal import printable

WITHIN_S = 60.0
MAX_BYTES = 200_000
_ENDS_WITHIN_S = 2.0
_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
# Variables that keep programs from waiting for input or drawing.
_QUIET = {
    "TERM": "dumb",
    "NO_COLOR": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
}


async def output_of(command: str, within_s: float = WITHIN_S) -> str:
    """The output of `command` in the shell, both streams; its last line tells whether the command
    failed, took too long or printed too much.

    All processes that it started end with it, also if the caller is cancelled. Raises UsageError if
    the command can't be run.
    """
    try:
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **_QUIET},
        )
    except (OSError, ValueError) as e:
        raise UsageError(f"the command can't be run: {e}") from e
    assert process.stdout is not None
    output = bytearray()
    note = ""
    try:
        async with asyncio.timeout(within_s):
            while not process.stdout.at_eof() and len(output) <= MAX_BYTES:
                output += await process.stdout.read(65536)
            if len(output) > MAX_BYTES:
                note = f"cut after {MAX_BYTES:,} bytes"
            else:
                code = await process.wait()
                note = f"ended with {code}" if code else ""
    except TimeoutError:
        note = f"stopped after {within_s:g} s"
    finally:
        _end(process)
        with suppress(TimeoutError):  # a process that left the group may keep the pipe open
            await asyncio.wait_for(process.communicate(), _ENDS_WITHIN_S)
    text = output[:MAX_BYTES].decode("utf-8", "replace").replace("\r\n", "\n")
    text = printable(_CODES.sub("", text)).rstrip()
    if note:
        return f"{text}\n[{note}]" if text else f"[{note}]"
    return text or "[it printed nothing]"


def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            process.kill()
