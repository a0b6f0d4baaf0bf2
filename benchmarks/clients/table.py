"""Write the results of `clients loops` and `scenes` to docs/clients.md and client_runs.json.

make bench ARGS="clients table --loops loops.json --scenes scenes.json --date 2026-11-29"

docs/clients.md is changed between its marks. `localllm connect` and `run` read client_runs.json.

"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.clients.agent import Agent
from benchmarks.clients.agents import AGENTS
from benchmarks.clients.notations import NOTATIONS
from benchmarks.clients.scenes import SCENES
from localllm.cli.editors.recipes import RECIPES, ClientTarget

_ROOT = Path(__file__).parents[2]
_DOCUMENT = _ROOT / "docs/clients.md"
_RUNS = _ROOT / "localllm/cli/editors/client_runs.json"
_MARKS = ("<!-- {}: written by benchmarks/clients/table.py -->", "<!-- end of {} -->")
_MOST_CHARS = 160
Results = Mapping[str, Mapping[str, Any]]


def _of(agent: Agent, results: Results) -> dict[str, Mapping[str, Any]]:
    """Return the client's results by the rest of the key after its name."""
    templates = {n.name for n in NOTATIONS}
    found = {}
    for key, value in results.items():
        rest = key.removeprefix(f"{agent.name} ")
        if rest != key and rest.partition(" ")[0] in templates:
            found[rest] = value
    return found


def own_prompt_tokens(loops: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the size of a client's own prompt: the largest over the templates."""
    return max((loop.get("own_prompt_tokens", 0) for loop in loops.values()), default=0)


def table(loops: Results, scenes: Results, date: str) -> str:
    """Return a table of all clients that were run: version, tokens of the own prompt, complete
    loops and results of the scenes. Incomplete ones are listed below it."""
    head = ["client", "version", "own prompt", "loops", *SCENES]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    notes: list[str] = []
    complete = tried = 0
    for agent in AGENTS:
        looped = _of(agent, loops)
        if not looped:
            continue
        done = [loop for loop in looped.values() if not loop["stopped"]]
        complete += len(done)
        tried += len(looped)
        for name, loop in looped.items():
            if loop["stopped"]:
                notes.append(f"* {agent.name}, {name}: {_short(loop['stopped'])}")
        versions = {loop["version"] for loop in looped.values()}
        tokens = own_prompt_tokens(looped)
        cells = [
            agent.name,
            ", ".join(sorted(versions)),
            f"{tokens:,}" if agent.recipe and tokens else "–",
            f"{len(done)} of {len(looped)}",
        ]
        said = {key.rpartition(" ")[2]: value["said"] for key, value in _of(agent, scenes).items()}
        cells += [_short(said.get(scene, "–")) for scene in SCENES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            f"{date}: {complete} of {tried} loops complete.",
            "",
            *lines,
            *([""] if notes else []),
            *notes,
        ]
    )


def runs(loops: Results) -> dict[str, dict[str, Any]]:
    """Return for each recipe the tokens of its own prompt, and its version if all of its loops are
    complete."""
    found: dict[str, dict[str, Any]] = {}
    for agent in AGENTS:
        looped = _of(agent, loops)
        if not agent.recipe or not looped:
            continue
        version = next(iter(looped.values()))["version"]
        if any(loop["stopped"] for loop in looped.values()):
            version = ""
        found[agent.recipe] = {"version": version, "own_prompt_tokens": own_prompt_tokens(looped)}
    return found


def recipes_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return all recipes with their programs, the kinds of calls they make, and the version that
    was run."""
    lines = ["| recipe | program | calls | run here with |", "|---|---|---|---|"]
    for name, recipe_of in RECIPES.items():
        recipe = recipe_of(ClientTarget("http://127.0.0.1:1", "model", 4096), Path("/"))
        version = measured.get(name, {}).get("version") or "–"
        calls = ", ".join(recipe.probes) or "–"
        lines.append(f"| {name} | {recipe.name} | {calls} | {version} |")
    return "\n".join(lines)


def _short(text: str) -> str:
    """Return text on one line, without characters that break a table and names of temporary
    folders."""
    text = re.sub(r"(/\w+)*/client-\w+", "", text.replace("|", "/").replace("\n", " "))
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "…"


def put(document: str, name: str, text: str) -> str:
    """Return `document` with `text` between the marks of `name`."""
    begin, end = (m.format(name) for m in _MARKS)
    head, _, rest = document.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def main() -> None:
    """Write the results in the given files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", type=Path, required=True)
    parser.add_argument("--scenes", type=Path, required=True)
    parser.add_argument("--date", required=True)
    given = parser.parse_args()
    loops = json.loads(given.loops.read_text())
    # A client that can't be installed here keeps the results of an earlier run.
    measured = {**json.loads(_RUNS.read_text()), **runs(loops)}
    _RUNS.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    document = _DOCUMENT.read_text(encoding="utf-8")
    document = put(
        document, "clients", table(loops, json.loads(given.scenes.read_text()), given.date)
    )
    document = put(document, "recipes", recipes_table(measured))
    _DOCUMENT.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
