"""The page docs/benchmarks.md with the results of benchmarks.peers, good and bad, for readers who
run no benchmarks."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers_setup import OURS, Group
from localllm.bench.against import ScenarioResult
from localllm.bench.ratio import RoundComparison

# Ratios closer to 1 than this count as equal. So do figures that are better in one round and worse
# in another.
_EVEN = 0.03


@dataclass(frozen=True, slots=True)
class Run:
    """The run of one group."""

    group: Group
    found: ScenarioResult


def page(runs: Sequence[Run], model: str, command: str) -> str:
    """Return the whole page."""
    first = [
        "# Benchmarks",
        "",
        "How `localllm serve` compares with what people run otherwise. The servers run side by "
        "side on one machine. They are "
        "measured in turn, round by round, so that whatever else the machine does falls on all of "
        "them. Each ratio is the "
        "median of the rounds' own ratios, with the smallest and the largest beside it. Tokens "
        "are counted by the client.",
        "",
        f"Measured {datetime.date.today().isoformat()} with `{command}`. `localllm bench "
        "--against URL` does the same "
        "with any server of yours.",
        "",
        "## Machine and versions",
        "",
        *_machine(),
        f"- model: {model}",
        *dict.fromkeys(
            f"- {name}: {said}" for run in runs for name, said in run.group.versions.items()
        ),
    ]
    return "\n".join([*first, *_summary(runs), *[line for run in runs for line in _group(run)], ""])


def _machine() -> list[str]:
    from localllm.device.detect import detect

    device = detect()
    memory = f"{device.memory.total_bytes / 1e9:.0f} GB"
    bandwidth = (
        f", {device.bandwidth_gbps.value:.0f} GB/s ({device.bandwidth_gbps.basis})"
        if device.bandwidth_gbps
        else ""
    )
    load = (
        f", load average {os.getloadavg()[0]:.1f} when this was written"
        if hasattr(os, "getloadavg")
        else ""
    )
    return [
        f"- {device.name}: {memory}{bandwidth}",
        f"- {platform.system()} {platform.machine()}, Python {platform.python_version()}{load}",
    ]


def _summary(runs: Sequence[Run]) -> list[str]:
    worse: list[str] = []
    better: list[str] = []
    for run in runs:
        for table in run.found.tables:
            for name in table.values:
                ratios = table.ratios(OURS, name) if name != OURS else None
                if (
                    ratios is None
                    or abs(ratios.median - 1) <= _EVEN
                    or ratios.low <= 1 <= ratios.high
                ):
                    continue
                won = (ratios.median > 1) == (table.better == "more")
                said = f"- {table.title}, against {name}: {_best(table, name)} ({ratios} of theirs)"
                (better if won else worse).append(said)
    nothing = ["- nothing that was measured"]
    return ["", "## Where others are better", "", *(worse or nothing), "",
    "## Where localllm is better", "",
            *(better or nothing)]  # fmt: skip


def _best(table: RoundComparison, name: str) -> str:
    return f"{table.median(OURS):.4g} {table.unit} against {table.median(name):.4g}"


def _group(run: Run) -> list[str]:
    names = [server.name for server in run.group.servers]
    others = [name for name in names if name != OURS]
    said = ["", f"## {run.group.title}", ""]
    said += [f"- **{name}**: {means}" for name, means in run.found.means.items()]
    head = [OURS, *[part for name in others for part in (name, f"{OURS} ÷ {name}")]]
    said += ["", f"| | {' | '.join(head)} |", f"|---|{'--:|' * len(head)}"]
    for table in run.found.tables:
        cells = [_cell(table, OURS)]
        for name in others:
            ratios = table.ratios(OURS, name)
            cells += [_cell(table, name), str(ratios) if ratios is not None else "–"]
        said.append(
            f"| {table.title}, {table.unit} ({table.better} is better) | {' | '.join(cells)} |"
        )
    said += ["", f"{run.found.rounds} rounds; tokens counted {run.found.counter}."]
    for name, (theirs, ours) in run.found.counter.differing.items():
        said.append(
            f"{name} counts differently: it reported {theirs} tokens, but at most {ours} arrived."
        )
    said += run.found.notes
    said += [f"Failed: {fault}." for fault in run.found.faults]
    return said


def _cell(table: RoundComparison, name: str) -> str:
    return f"{table.median(name):.4g}" if table.known_values(name) else "–"
