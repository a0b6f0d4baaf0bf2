"""A desktop stays awake while requests run, and only then."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from localllm.server.sleep_inhibitor import SleepInhibitor, holding_command
from support.until import until

EVERYTHING = {name: f"/usr/bin/{name}" for name in ("caffeinate", "systemd-inhibit")}
GNOME = {"XDG_CURRENT_DESKTOP": "GNOME", "WAYLAND_DISPLAY": "wayland-0"}


@pytest.mark.parametrize(
    ("platform", "there", "environment", "program"),
    [
        ("darwin", EVERYTHING, {}, "/usr/bin/caffeinate -i cat"),
        ("linux", EVERYTHING, GNOME, "/usr/bin/systemd-inhibit --what=idle"),
        ("linux", EVERYTHING, {"DISPLAY": ":0"}, "/usr/bin/systemd-inhibit --what=idle"),
        ("linux", EVERYTHING, {}, ""),
        ("linux", EVERYTHING, {"DISPLAY": ""}, ""),
        ("linux", {}, GNOME, ""),
        ("darwin", {}, {}, ""),
        ("win32", EVERYTHING, GNOME, ""),
    ],
)
def test_the_inhibitor_uses_the_systems_own_program_and_only_on_desktops(
    platform: str, there: Mapping[str, str], environment: Mapping[str, str], program: str
) -> None:
    command = " ".join(holding_command(platform, there.get, environment))
    assert command.startswith(program)
    assert bool(command) == bool(program)


# Writes "held", waits for the end of its input like `cat`, and writes "let go".
HOLD = (
    "import sys, pathlib as p; f = p.Path(sys.argv[1]); f.write_text('held'); sys.stdin.read(); "
    "f.write_text('let go')"
)


async def said(file: Path, words: str) -> None:
    await asyncio.to_thread(
        until, lambda: file.exists() and file.read_text() == words, f"it never {words}"
    )


def test_sleep_is_inhibited_from_the_first_request_to_the_end_of_the_last(tmp_path: Path) -> None:
    file = tmp_path / "state"

    async def scene() -> None:
        awake = SleepInhibitor((sys.executable, "-c", HOLD, str(file)), after_s=0.0)
        for _ in range(2):
            with awake.keep_awake():
                with awake.keep_awake():
                    await said(file, "held")
                assert file.read_text() == "held", "one request still runs"
            await said(file, "let go")
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    asyncio.run(scene())


def test_short_requests_start_no_inhibitor(tmp_path: Path) -> None:
    file = tmp_path / "state"

    async def scene() -> None:
        awake = SleepInhibitor((sys.executable, "-c", HOLD, str(file)), after_s=60.0)
        for _ in range(100):
            with awake.keep_awake():
                pass

    asyncio.run(scene())
    assert not file.exists()


@pytest.mark.parametrize(
    "command", [(), ("/nowhere/to/be/found",), (sys.executable, "-c", "raise SystemExit(1)")]
)
def test_requests_run_without_a_program_that_inhibits_sleep(command: tuple[str, ...]) -> None:
    async def scene() -> None:
        awake = SleepInhibitor(command, after_s=0.0)
        for _ in range(3):
            with awake.keep_awake():
                await asyncio.to_thread(int)
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)

    asyncio.run(scene())


def test_sleep_is_allowed_again_after_the_process_ends(tmp_path: Path) -> None:
    file = tmp_path / "state"
    code = (
        "import asyncio, os, sys, pathlib\n"
        "from localllm.server.sleep_inhibitor import SleepInhibitor\n"
        "async def scene():\n"
        "    awake = SleepInhibitor((sys.executable, '-c', sys.argv[1], sys.argv[2]), after_s=0.0)\n"
        "    with awake.keep_awake():\n"
        "        while not pathlib.Path(sys.argv[2]).exists(): await asyncio.sleep(0.01)\n"
        "        os._exit(9)\n"
        "asyncio.run(scene())\n"
    )

    async def scene() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, HOLD, str(file))
        assert await process.wait() == 9
        await said(file, "let go")

    asyncio.run(scene())
