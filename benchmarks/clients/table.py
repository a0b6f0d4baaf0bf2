"""Writes what loops and scenes measured into docs/clients.md: between its marks, everything else
there stays.

make bench ARGS="clients table --loops loops.json --scenes scenes.json --date 2026-11-22"
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.clients.agents import AGENTS
from benchmarks.clients.notations import NOTATIONS
from benchmarks.clients.scenes import SCENES

_DOCUMENT = Path(__file__).parents[2] / "docs/clients.md"
_MARKS = ("<!-- {}: written by benchmarks/clients/table.py -->", "<!-- end of {} -->")
_MOST_CHARS = 160


def loops_table(results: Mapping[str, Any], date: str) -> str:
    """Clients by templates; what stopped a loop stands below."""
    names = [n.name for n in NOTATIONS]
    lines = [f"| client | version | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    notes: list[str] = []
    complete = tried = 0
    for agent in AGENTS:
        cells = []
        for name in names:
            result = results.get(f"{agent.name} {name}")
            if result is None:
                cells.append("–")
                continue
            tried += 1
            complete += not result["stopped"]
            cells.append("yes" if not result["stopped"] else "no")
            if result["stopped"]:
                notes.append(f"* {agent.name}, {name}: {_short(result['stopped'])}")
        lines.append(f"| {agent.name} | {agent.version} | {' | '.join(cells)} |")
    return "\n".join(
        [
            f"{date}: {complete} of {tried} loops complete.",
            "",
            *lines,
            *([""] if notes else []),
            *notes,
        ]
    )


def scenes_table(results: Mapping[str, Any], date: str) -> str:
    """Clients by scenes, in words."""
    lines = [f"{date}.", "", f"| client | {' | '.join(SCENES)} |", "|---" * (len(SCENES) + 1) + "|"]
    for agent in AGENTS:
        said: dict[str, str] = {}
        for key, result in results.items():
            client, _, scene = key.rsplit(" ", 2)
            if client == agent.name:
                said[scene] = result["said"]
        if said:
            lines.append(
                f"| {agent.name} | {' | '.join(_short(said.get(s, '–')) for s in SCENES)} |"
            )
    return "\n".join(lines)


def _short(text: str) -> str:
    """On one line, without what a table can't hold and without the names of passing folders."""
    text = re.sub(r"/tmp/client-\w+", "", text.replace("|", "/").replace("\n", " "))
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "…"


def put(document: str, name: str, text: str) -> str:
    """`document` with `text` between the marks of `name`."""
    begin, end = (m.format(name) for m in _MARKS)
    head, _, rest = document.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main() -> None:
    """Write what the files given hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", type=Path)
    parser.add_argument("--scenes", type=Path)
    parser.add_argument("--date", required=True)
    given = parser.parse_args()
    document = _DOCUMENT.read_text(encoding="utf-8")
    for name, path, table in (
        ("loops", given.loops, loops_table),
        ("scenes", given.scenes, scenes_table),
    ):
        if path is not None:
            document = put(document, name, table(json.loads(path.read_text()), given.date))
    _DOCUMENT.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
