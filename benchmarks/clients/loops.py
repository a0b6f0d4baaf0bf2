"""Real clients with the real server: which of them complete a loop, for each template.

    make bench ARGS="clients loops --only codex,claude --templates Qwen3.5"
    make bench ARGS="clients loops --results loops.json"

A loop is: read, edit, run, answer. The model of the server is scripted: it writes in the format
that the template's publisher documents, under the server's own grammars (model.py). Clients are
installed at pinned versions into --cache, run one at a time, and configured with the output of
`localllm connect`. Templates come from the llama.cpp source tree in LOCALLLM_LLAMA_CPP_SOURCE.

"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from benchmarks.clients.agent import Agent, Place, end_left, installed, judge, start, wait
from benchmarks.clients.agents import AGENTS
from benchmarks.clients.brain import Worker
from benchmarks.clients.model import ScriptedModel
from benchmarks.clients.notations import NOTATIONS, Notation
from benchmarks.clients.own_prompt import tokens_of
from benchmarks.clients.recorder import Exchange, Recorder
from localllm.cli.editors.configuring import target_of
from localllm.server.models.router import ServedModel
from support.http_server import Running, running_server


@dataclass(slots=True)
class Result:
    """The result of one client with one template. `stopped` is empty for a complete loop."""

    agent: str
    version: str
    notation: str
    stopped: str
    seconds: float
    coerced: list[str]
    own_prompt_tokens: int


def source_of(notation: Notation) -> str:
    """Return the template's text."""
    root = os.environ.get("LOCALLLM_LLAMA_CPP_SOURCE")
    if not root:
        raise SystemExit(
            "LOCALLLM_LLAMA_CPP_SOURCE must name a llama.cpp source tree, for its models/templates"
        )
    return (Path(root) / "models/templates" / notation.template).read_text(encoding="utf-8")


@dataclass(slots=True)
class Stage:
    """The parts of one run: its folders, the script of the model, the model, and the exchanged
    messages. `restart` stops the server and starts it again on the same port."""

    place: Place
    worker: Worker
    model: ScriptedModel
    exchanges: list[Exchange]
    restart: Callable[[], None]


@contextmanager
def stage(
    agent: Agent, notation: Notation, program: Path, n_ctx: int = 0, pause_s: float = 0.0
) -> Iterator[Stage]:
    """Start a server with the scripted model, and create separate folders for the client."""
    with tempfile.TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        worker = agent.worker(notation, work)
        window = n_ctx or agent.n_ctx
        model = ScriptedModel(notation, source_of(notation), worker, n_ctx=window, pause_s=pause_s)
        exchanges: list[Exchange] = []
        with ExitStack() as running:
            server = running.enter_context(_recorded(model, exchanges, 0))

            def restart() -> None:
                running.close()
                running.enter_context(_recorded(model, exchanges, server.port))

            place = Place(program, home, work, target_of(server.url, None, None))
            exchanges.clear()
            try:
                yield Stage(place, worker, model, exchanges, restart)
            finally:
                end_left(home)


@contextmanager
def _recorded(model: ScriptedModel, exchanges: list[Exchange], port: int) -> Iterator[Running]:
    """Run a server of `model` that appends its exchanges to `exchanges`."""
    models = [ServedModel("local-model", model, info=model.info)]
    with running_server(models, port=port) as server:
        stack = server.app.build_middleware_stack()
        server.app.middleware_stack = Recorder(stack, exchanges)
        yield server


def run(agent: Agent, notation: Notation, program: Path, keep: Path | None = None) -> Result:
    """Run one loop."""
    with stage(agent, notation, program) as on:
        ended = wait(*start(agent, on.place), agent.limit_s)
        stopped = judge(agent, on.place, on.worker, ended)
    if stopped:
        stopped += because(on.model, on.exchanges)
    if keep is not None:
        _keep(keep / f"{agent.name.replace('/', '-')}-{notation.name}", ended.output, on)
    return Result(
        agent.name,
        agent.version,
        notation.name,
        stopped,
        ended.seconds,
        on.model.coerced,
        tokens_of(on.worker.first_prompt),
    )


def because(model: ScriptedModel, exchanges: list[Exchange]) -> str:
    """Return the first error between client and server, if one was recorded."""
    if model.refused:
        return f"; {model.refused[0]}"
    failed = [e for e in exchanges if e.status >= 400 and e.method == "POST"] or [
        e for e in exchanges if b'"error":' in e.reply or b"event: error" in e.reply
    ]
    if not failed:
        return ""
    reply = failed[0].reply.decode("utf-8", "replace")
    return f"; {failed[0].path} {failed[0].status}: {reply[:300]}"


def _keep(where: Path, output: str, on: Stage) -> None:
    where.mkdir(parents=True, exist_ok=True)
    (where / "output.txt").write_text(output)
    did = {"steps": on.worker.steps, "refused": on.model.refused, "coerced": on.model.coerced}
    (where / "steps.json").write_text(json.dumps(did))
    with (where / "exchanges.txt").open("w") as file:
        for e in on.exchanges:
            file.write(
                f"### {e.method} {e.path} -> "
                f"{e.status}\n{json.dumps(e.headers)}\n{json.dumps(e.body)}\n"
            )
            file.write(
                f"--- {json.dumps(e.reply_headers)}\n{e.reply.decode('utf-8', 'replace')}\n\n"
            )


class Given:
    """The options of the command line."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        self.only: str = parsed.only
        self.cache: Path = parsed.cache
        self.keep: Path | None = parsed.keep
        self.scenes: str = getattr(parsed, "scenes", "")
        wanted = parsed.only.split(",") if parsed.only else [a.name for a in AGENTS]
        by: float = parsed.patience
        self.agents = [
            replace(agent, limit_s=agent.limit_s * by, start_s=agent.start_s * by)
            for agent in AGENTS
            if agent.name in wanted
        ]
        self.notations = [
            n for n in NOTATIONS if not parsed.templates or n.name in parsed.templates.split(",")
        ]
        self._results: Path | None = parsed.results

    def programs(self) -> Iterator[tuple[Agent, Path]]:
        """Yield the agents with their installed programs, without those that can't be installed."""
        for agent in self.agents:
            try:
                program = installed(agent, self.cache)
            except (OSError, subprocess.CalledProcessError) as e:
                print(f"{agent.name:14} can't be installed: {e}", flush=True)
            else:
                yield agent, program

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Store a result in the file of results, in place of an earlier one."""
        if self._results is None:
            return
        known = json.loads(self._results.read_text()) if self._results.exists() else {}
        known[name] = result
        self._results.write_text(json.dumps(known, indent=1))


def arguments(about: str | None, more: Mapping[str, str] = MappingProxyType({})) -> Given:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="clients by name, comma-separated")
    parser.add_argument("--templates", default="", help="templates by name, comma-separated")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor of the time limits, for a busy machine"
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/localllm-clients")
    parser.add_argument("--keep", type=Path, help="folder for what was said in each run")
    parser.add_argument(
        "--results", type=Path, help="JSON file that results are added to, run by run"
    )
    for name, said in more.items():
        parser.add_argument(name, default="", help=said)
    return Given(parser.parse_args())


def main() -> None:
    """Run the clients and templates of the command line."""
    given = arguments(__doc__)
    for agent, program in given.programs():
        for notation in given.notations:
            result = run(agent, notation, program, given.keep)
            said = result.stopped or "complete"
            print(
                f"{result.agent:14} {result.notation:18} {result.seconds:5.1f} s  "
                f"{result.own_prompt_tokens:6} tokens  {said}",
                flush=True,
            )
            kept = {
                "version": result.version,
                "stopped": result.stopped,
                "coerced": sorted(set(result.coerced)),
                "own_prompt_tokens": result.own_prompt_tokens,
            }
            given.add(f"{result.agent} {result.notation}", kept)


if __name__ == "__main__":
    main()
