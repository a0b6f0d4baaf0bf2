"""Other servers compared with ours, from their installation to the page docs/benchmarks.md.

    python -m benchmarks.peers [--rounds 5] [--only gguf,drafting,mlx] [--scenarios single,four,…]
    [--model FILE]
                               [--llama-server PROGRAM] [--without NAME,…] [--page
                               docs/benchmarks.md] [--json FILE]
    python -m benchmarks.peers --only baseline --baseline CHECKOUT     this tree and an earlier
                                                                       commit of it

The servers are built, started and measured in turn. llama-server is built from the sources in
llama-cpp-python's own release, unless --llama-server names a program. The server of
llama-cpp-python and mlx_lm.server are installed in addition to our environment. Ollama is included
if it is installed. All servers have the same threads, context and number of streams. Do not use the
machine meanwhile.

"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.models import gemma, smollm2
from benchmarks.peers_page import Run, page
from benchmarks.peers_setup import GROUPS, OURS, Group, NotHereError, Wanted
from benchmarks.processes import ProcessScenarios, put_through, running
from localllm.bench import against
from localllm.bench.scenarios import DEFAULT

_SCENARIOS = (*DEFAULT, "warm", "restart", "kill", "burnt", "rest", "crowded")


def measure(group: Group, names: list[str], rounds: int) -> Run:
    """Start one group's servers and measure them."""

    wanted = [name for name in names if not group.only or name in group.only]
    with running(group.servers) as started:
        if not started or started[0].name != OURS:
            raise NotHereError(f"{group.title}: {OURS} itself did not start")
        return Run(replace(group, servers=started), put_through(started, wanted, rounds))


def main() -> None:
    """Prepare, measure, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="gguf,drafting,mlx")
    parser.add_argument("--scenarios", default=",".join(_SCENARIOS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--llama-server", type=Path, default=None)
    parser.add_argument(
        "--without", default="", help="peers to leave out, such as llama-cpp-python"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        default=None,
        help="a checkout of an earlier commit, with its .venv",
    )
    parser.add_argument("--page", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    named = {"smollm2": smollm2, "gemma": gemma}
    model = named[arguments.model]() if arguments.model in named else Path(arguments.model)
    names = against.parse_scenarios(arguments.scenarios, ProcessScenarios.means)
    runs: list[Run] = []
    command = " ".join(["python -m benchmarks.peers", *_told(arguments)])
    with tempfile.TemporaryDirectory() as logs:
        for title in arguments.only.split(","):
            try:
                without = arguments.without.split(",")
                group = GROUPS[title](
                    Wanted(
                        model,
                        arguments.llama_server,
                        Path(logs),
                        without,
                        baseline=arguments.baseline,
                    )
                )
                runs.append(measure(group, names, arguments.rounds))
            except NotHereError as e:
                print(f"left out: {e}", file=sys.stderr, flush=True)
                continue
            # Write after every group, so that an error in the next group does not lose its figures.
            _write(runs, model.name, command, arguments)
    print(page(runs, model.name, command))


def _write(runs: list[Run], model: str, command: str, arguments: argparse.Namespace) -> None:
    if arguments.page:
        arguments.page.write_text(page(runs, model, command), encoding="utf-8")
    if arguments.json:
        body = {
            "command": command,
            "groups": {run.group.title: run.found.to_json() for run in runs},
        }
        arguments.json.write_text(json.dumps(body, indent=1), encoding="utf-8")


def _told(arguments: argparse.Namespace) -> list[str]:
    """Return the options that change the measurement."""
    said = [f"--rounds {arguments.rounds}"]
    if arguments.only != "gguf,drafting,mlx":
        said.append(f"--only {arguments.only}")
    if arguments.scenarios != ",".join(_SCENARIOS):
        said.append(f"--scenarios {arguments.scenarios}")
    if arguments.without:
        said.append(f"--without {arguments.without}")
    if arguments.model != "smollm2":
        said.append(f"--model {Path(arguments.model).name}")
    return said


if __name__ == "__main__":
    main()
