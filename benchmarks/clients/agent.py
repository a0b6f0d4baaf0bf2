"""What a client needs to be run here: where it comes from, how it is pointed at the server, how it
is started, and how its end is judged."""

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
    """Where one run happens: the program's own folder, a home of its own, the folder it works in,
    and the server."""

    program: Path
    home: Path
    folder: Path
    target: ClientTarget


@dataclass(frozen=True, slots=True)
class Agent:
    """One client. `package` and `version` as its registry knows them; `recipe` is its name for
    `localllm connect`, whose output configures it here; `command` starts it without a terminal;
    `prepare` does what connect asks a person to do.

    `worker` is another brain than usual, `offers_tools` False for a client that reads files itself
    and takes the edit from the text of the answer, `edits` False for a client that leaves files alone, `says`
    what its output must hold. `mcp` offers the client an MCP server, started by a command, and
    returns what is added to its own command.
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
    # Until its first request in a scene.
    start_s: float = 60.0
    mcp: Callable[[Place, Sequence[str]], Sequence[str]] | None = None
    python: str = "python3"
    n_ctx: int = 400_000  # tokens of one byte: about 100,000 of a real vocabulary


def installed(agent: Agent, cache: Path) -> Path:
    """The folder of the installed program; installs it first where it is not there."""
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
    """Configure the client as `localllm connect` does; returns the environment it says to set."""
    if not agent.recipe:
        return {}
    recipe: ClientRecipe = RECIPES[agent.recipe](place.target, place.home)
    for file in recipe.files:
        write_file(file)
    return dict(recipe.environment)


@dataclass(slots=True)
class Ended:
    """How a run of the program ended."""

    code: int | None
    output: str
    seconds: float


def start(
    agent: Agent, place: Place, mcp_server: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], Path]:
    """The program, running, with an MCP server where one is given; and the file its output goes
    to."""
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
            # a shell's background job hands on that Ctrl-C is ignored
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    return process, output


def wait(process: subprocess.Popen[bytes], output: Path, limit_s: float) -> Ended:
    """The program's end, or its killing at the limit, with everything it started."""
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
    """End what a client left running behind its back: daemons have its home in their
    environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                process.kill()
        except psutil.Error:
            pass


def judge(agent: Agent, place: Place, worker: Worker, ended: Ended) -> str:
    """Where a loop stopped; "" = complete."""
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
