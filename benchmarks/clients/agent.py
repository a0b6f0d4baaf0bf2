"""The description of a client: its package, its configuration for the server, its command, and the
check of its result."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from benchmarks.clients.brain import DONE, NEW, OLD, TASK, TEXT, Worker
from localllm.cli.editors.configuring import write_file
from localllm.cli.editors.recipes import RECIPES, ClientRecipe, ClientTarget


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of one run (program, home and work) and the server."""

    program: Path
    home: Path
    folder: Path
    target: ClientTarget


@dataclass(frozen=True, slots=True)
class Agent:
    """One client. `package` and `version` are its names in the registry. `recipe` is its name for
    `localllm connect`, whose output configures it here. `command` starts it without a terminal.
    `prepare` returns the commands that connect tells the user to run.

    `worker` replaces the usual script of the model. `offers_tools` is False for a client that reads
    files itself and takes the edit from the answer's text, and `edits` is False for a client that
    changes no files. `says` is text that its output must contain. `mcp` configures an MCP server
    that is started by a command, and returns additional arguments for the client's command.
    """

    name: str
    registry: Literal["npm", "pip"]
    package: str
    version: str
    command: Callable[[Place], Sequence[str]]
    recipe: str = ""
    also: tuple[str, ...] = ()
    prepare: Callable[[Place], Sequence[Sequence[str]]] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    worker: type[Worker] = Worker
    offers_tools: bool = True
    edits: bool = True
    says: str = DONE
    limit_s: float = 90.0
    # Limit until its first request in a scene.
    start_s: float = 60.0
    mcp: Callable[[Place, Sequence[str]], Sequence[str]] | None = None
    python: str = "python3"
    n_ctx: int = 400_000  # tokens of one byte: about 100,000 of a real vocabulary


def installed(agent: Agent, cache: Path) -> Path:
    """Return the folder of the installed program, after installing it if necessary."""
    name = f"{agent.package}-{agent.version}".replace("@", "").replace("/", "-")
    where = cache / agent.registry / name
    ready = where / ".installed"
    if ready.exists():
        return where
    where.mkdir(parents=True, exist_ok=True)
    if agent.registry == "npm":
        packages = [f"{agent.package}@{agent.version}", *agent.also]
        subprocess.run(
            [
                "npm",
                "install",
                "--no-audit",
                "--no-fund",
                "--loglevel=error",
                "--prefix",
                str(where),
                *packages,
            ],
            check=True,
        )
    else:
        packages = [f"{agent.package}=={agent.version}", *agent.also]
        subprocess.run([agent.python, "-m", "venv", str(where)], check=True)
        subprocess.run([str(where / "bin/pip"), "install", "-q", *packages], check=True)
    ready.touch()
    return where


def connected(agent: Agent, place: Place) -> dict[str, str]:
    """Configure the client as `localllm connect` does. Return the environment variables to set."""
    if not agent.recipe:
        return {}
    recipe: ClientRecipe = RECIPES[agent.recipe](place.target, place.home)
    for file in recipe.files:
        write_file(file)
    return dict(recipe.environment)


@dataclass(slots=True)
class Ended:
    """The end of a program's run."""

    code: int | None
    output: str
    seconds: float


def start(
    agent: Agent, place: Place, mcp_server: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the program, with an MCP server if one is given. Return its process and its output
    file."""
    (place.folder / "notes.txt").write_text(TEXT)
    subprocess.run(["git", "init", "-q"], cwd=place.folder, check=True)
    bins = [place.program / "node_modules/.bin", place.program / "bin"]
    environment = {
        "PATH": os.pathsep.join([*map(str, bins), os.environ["PATH"]]),
        "HOME": str(place.home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "CI": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        **connected(agent, place),
        **agent.environment,
    }
    for step in agent.prepare(place) if agent.prepare else ():
        subprocess.run(
            step, env=environment, cwd=place.folder, check=True, capture_output=True, timeout=240
        )
    more = agent.mcp(place, mcp_server) if agent.mcp is not None and mcp_server else ()
    output = place.home / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            ["nice", "-n", "10", *agent.command(place), *more],
            env=environment,
            cwd=place.folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Background jobs of a shell ignore Ctrl-C, and their children inherit this.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    return process, output


def wait(process: subprocess.Popen[bytes], output: Path, limit_s: float) -> Ended:
    """Wait for the program's end, or kill it with all its children at the limit."""
    started = time.monotonic()
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    end(process)
    return Ended(code, output.read_text(errors="replace"), time.monotonic() - started)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the program's whole process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def end_left(home: Path) -> None:
    """End daemons that a client left running. They have its home in their environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                process.kill()
        except psutil.Error:
            pass


def judge(agent: Agent, place: Place, worker: Worker, ended: Ended) -> str:
    """Return the point where a loop stopped, or "" if it is complete."""
    text = (place.folder / "notes.txt").read_text()
    if "answer" not in worker.steps:
        did = ", ".join(s for s in worker.steps if s != "side") or "nothing"
        return ("ran out of time" if ended.code is None else f"exit {ended.code}") + (
            f" after: {did}"
        )
    if agent.edits and (OLD in text or NEW not in text):
        return "the file is unchanged"
    if ended.code is None:
        return "answered, but did not end"
    if ended.code != 0:
        return f"exit {ended.code}"
    return "" if agent.says in ended.output else "the answer was not shown"


__all__ = [
    "TASK",
    "Agent",
    "Ended",
    "Place",
    "connected",
    "end",
    "end_left",
    "installed",
    "judge",
    "start",
    "wait",
]
