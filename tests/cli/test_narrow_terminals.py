"""Every command on terminals of several widths, with a home directory that cannot be written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.cells import cell_len

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pty and /proc")

# All commands run in one process, because each start takes 0.5 s. A shell's background job inherits
# an ignored SIGINT.
CODE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from localllm.cli import main
for words in {commands}:
    print("\\x1e" + words, flush=True)
    try:
        main.run(words.split())
    except SystemExit as left:
        print("\\x1f" + str(left.code or 0), flush=True)
"""
COMMANDS = (
    "--help", "--version", "models", "models list", "models info starter", "models du",
    "models verify", "models prune", "models adopt /nosuch", "cache clear --yes", "catalog --help",
    "config", "config set context abc", "device", "setup --dry-run", "engines",
    "connect", "connect zed", "run codex", "service status", "licences", "chat --help",
    "chat -m nosuch hi", "serve nosuch", "serve --port 99999", "pull nosuch", "rm nosuch", "ps",
    "search words", "update", "recommend --device m4-max-64gb", "nosuch",
)  # fmt: skip
# Commands that load a model.
WITH_A_MODEL = (
    "chat -m MODEL --own --context 512 --max-tokens 8 hi", "doctor MODEL",
    "quality MODEL --kv q8_0 --blocks 1 --block 64", "quantize MODEL --to Q8_0 --anyway -o q.gguf",
)  # fmt: skip
BENCH = "bench MODEL --context 1024"
# Runs until Ctrl-C, which is sent when the output mentions that Ctrl-C stops it.
SERVE = "serve MODEL --port 0 --context 512"
STOPS = b"Ctrl-C"


def on_a_terminal(columns: int, environment: dict[str, str], commands: Sequence[str]) -> str:
    """Return the output and errors of these commands on a terminal that is `columns` wide.

    A server is interrupted as soon as it serves.
    """
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", CODE.format(commands=[*commands])],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    written = b""
    interrupted = False
    try:
        while data := os.read(ours, 1 << 16):
            written += data
            last = written.rpartition(b"\x1e")[2]
            if last.startswith(b"serve /") and STOPS in last and not interrupted:
                interrupted = True
                child.send_signal(signal.SIGINT)
    except OSError:  # the child has ended
        pass
    os.close(ours)
    child.wait()
    return written.decode().replace("\r\n", "\n")


def check(columns: int, commands: Sequence[str]) -> None:
    """Run the commands with a home directory that cannot be written, and measure their lines."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCALLLM_")}
    # Not even root can create a folder in /proc.
    environment |= {"HOME": "/proc/nosuch", "TERM": "xterm", "LOCALLLM_OFFLINE": "1"}
    # If a server answers at the usual port, `connect` prints a file that cannot be wrapped.
    environment["LOCALLLM_PORT"] = "1"
    for name in ("COLUMNS", "HF_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    parts = on_a_terminal(columns, environment, commands).split("\x1e")[1:]
    assert len(parts) == len(commands)
    for part in parts:
        text, _, code = part.partition("\x1f")
        lines = [line.rpartition("\r")[2] for line in text.split("\n")[1:]]
        shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in lines]
        wide = [line for line in shown if cell_len(line) > columns and "$ " not in line]
        assert wide == [], part
        assert code.strip().isdigit(), part
        assert "Traceback" not in text


@pytest.mark.parametrize("columns", [20, 79])
def test_commands_fit_the_terminal_and_need_no_writable_home(columns: int) -> None:
    check(columns, COMMANDS)


@pytest.mark.parametrize(
    "columns", [20, *(pytest.param(width, marks=pytest.mark.long) for width in (33, 79, 120, 200))]
)
def test_commands_that_load_a_model_fit_the_terminal(
    columns: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = (*WITH_A_MODEL, SERVE)
    check(columns, [command.replace("MODEL", str(tiny_model)) for command in commands])
    assert (tmp_path / "q.gguf").is_file()


@pytest.mark.long
@pytest.mark.parametrize("columns", [20, 33, 79, 120, 200])
def test_the_figures_of_bench_fit_the_terminal(columns: int, tiny_model: Path) -> None:
    check(columns, [BENCH.replace("MODEL", str(tiny_model))])
