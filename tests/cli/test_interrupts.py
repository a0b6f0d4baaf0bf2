"""Ctrl-C at many instants of each command ends it without a traceback, with its exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs process groups")

# An instant is a number of calls in the main thread, so it is the same on fast and busy machines.
# Like a terminal, the child interrupts its whole process group.
CODE = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from localllm.__main__ import run
instant = {instant}
calls = 0
class Dropped:
    def __del__(self):
        os.killpg(0, signal.SIGINT)
def counted(frame, event, argument):
    global calls
    calls += 1
    if calls == instant:
        {interrupt}
atexit.register(lambda: print("calls", calls, file=sys.stderr))
sys.argv = {argv}
sys.setprofile(counted)
run()
"""
AT_ONCE = "os.killpg(0, signal.SIGINT)"
# Python drops an exception in a destructor after printing the traceback.
IN_A_DESTRUCTOR = "Dropped()"
NEVER = 10**12
# Before this many calls, none of our code can catch the signal.
FIRST = 100
# The arguments of each command by its name.
COMMANDS = {
    "version": ["--version"],
    "models": ["models", "list"],
    "info": ["models", "info", "MODEL"],
    "verify": ["models", "verify"],
    "cache": ["cache"],
    "setup": ["setup", "--dry-run"],
    "service": ["service", "status"],
    "config": ["config"],
    "device": ["device"],
    "recommend": ["recommend", "--device", "m4-max-64gb"],
    "plan": ["recommend", "-m", "MODEL", "--device", "m4-max-64gb"],
    "connect": ["connect", "zed"],
    "check": ["connect", "codex", "--check"],
    "unknown": ["chat", "-m", "nosuch", "hi"],
    "chat": ["chat", "-m", "MODEL", "--own", "--context", "512", "--max-tokens", "8", "hi"],
    "serve": ["serve", "MODEL", "--port", "0", "--context", "512"],
    "bench": ["bench", "MODEL", "--context", "1024"],
    "quality": ["quality", "MODEL", "--kv", "q8_0", "--blocks", "1", "--block", "64"],
    "quantize": ["quantize", "MODEL", "--to", "Q8_0", "--anyway", "-o", "OUTPUT"],
    "doctor": ["doctor", "MODEL"],
}
SHORT = ("models", "quantize")


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a command: its exit code, its standard error, and its number of calls."""

    code: int
    text: str

    @property
    def n_calls(self) -> int:
        found = re.search(r"^calls (\d+)$", self.text, re.M)
        assert found is not None, self.text
        return int(found[1])


def interrupted(
    name: str, places: dict[str, Path], instant: int, interrupt: str = AT_ONCE
) -> Ended:
    """Run a command that is interrupted at an instant."""
    argv = ["localllm", *(str(places.get(word, word)) for word in COMMANDS[name])]
    places["OUTPUT"].unlink(missing_ok=True)
    child = subprocess.Popen(
        [sys.executable, "-c", CODE.format(instant=instant, argv=argv, interrupt=interrupt)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stderr is not None
    lines = []
    with child.stderr:
        for line in child.stderr:
            lines.append(line)
            if name == "serve" and instant == NEVER and "http://" in line:
                os.killpg(child.pid, signal.SIGINT)
    return Ended(child.wait(), "".join(lines))


def check(name: str, model: Path, output: Path, n_instants: int) -> None:
    """Interrupt a command at instants spread over its calls."""
    places = {"MODEL": model, "OUTPUT": output}
    interrupted(name, places, NEVER)  # fills the caches
    undisturbed = interrupted(name, places, NEVER)
    assert "Traceback" not in undisturbed.text
    faults = []
    for index in range(n_instants):
        instant = FIRST + index * undisturbed.n_calls // n_instants
        ended = interrupted(name, places, instant)
        if "Traceback" in ended.text or ended.code not in (130, undisturbed.code):
            faults.append((instant, ended.code, ended.text[-2000:]))
    assert faults == []


@pytest.mark.parametrize("name", SHORT)
def test_ctrl_c_ends_a_command(name: str, tiny_model: Path, tmp_path: Path) -> None:
    check(name, tiny_model, tmp_path / "tiny-Q8_0.gguf", 3)


@pytest.mark.parametrize("instant", [FIRST, 1_000, 10_000])
def test_ctrl_c_in_a_destructor_ends_a_command(
    instant: int, tiny_model: Path, tmp_path: Path
) -> None:
    places = {"MODEL": tiny_model, "OUTPUT": tmp_path / "tiny-Q8_0.gguf"}
    ended = interrupted("doctor", places, instant, IN_A_DESTRUCTOR)
    assert (ended.code, "Traceback" in ended.text) == (130, False), ended.text


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_50_instants_ends_each_command(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    check(name, tiny_model, tmp_path / "tiny-Q8_0.gguf", 50)
