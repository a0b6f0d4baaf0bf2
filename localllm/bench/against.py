"""Run the same load on several servers in interleaved rounds: `localllm bench --against`,
benchmarks/."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections import Counter as Counted
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from localllm.bench.ratio import RoundComparison, rotated
from localllm.bench.scenarios import MEANS, Scenarios
from localllm.bench.stream import BenchTarget
from localllm.bench.token_counts import Counter, Tokens, templated_tokens
from localllm.errors import BackendError, LocalLLMError, UsageError

_RESTART_TIMEOUT_S = 120.0
# After this many failures on a server, a scenario is skipped there: each failure may take minutes.
_MAX_FAILURES = 2
# A scenario that takes longer than this on a server is measured there only once.
_MAX_REPEATED_S = 150.0


@dataclass
class ScenarioResult:
    """The results of a run.

    `first`: the server whose ratios to the others are computed.
    `means`: the description of each scenario.
    `counter`: how tokens were counted.
    """

    first: str
    targets: Sequence[BenchTarget]
    means: Mapping[str, str]
    rounds: int
    counter: Counter
    tables: list[RoundComparison] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        servers = [
            {"name": target.name, "url": target.url, "model": target.model}
            for target in self.targets
        ]
        differing = {
            name: {"said": reported, "counted": counted}
            for name, (reported, counted) in self.counter.differing.items()
        }
        return {
            "servers": servers,
            "rounds": self.rounds,
            "tokens_counted": str(self.counter),
            "count_differs": differing,
            "tables": [table.to_json(self.first) for table in self.tables],
            "faults": self.faults,
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        text_lines = [f"{name:8} {means}" for name, means in self.means.items()]
        for table in self.tables:
            text_lines += ["", *table.lines(self.first)]
        text_lines.append("")
        text_lines.append(
            f"{self.rounds} rounds, the servers in turn: medians [smallest–largest], "
            "ratios round by round."
        )
        text_lines.append(f"Tokens are counted {self.counter}.")
        text_lines += self.notes
        for name, (reported, counted) in self.counter.differing.items():
            text_lines.append(
                f"{name} counts differently: it reported {reported} tokens, but at most {counted} "
                "arrived in the text."
            )
        return text_lines


def target_of(url: str, key: str = "", restart: str | None = None) -> BenchTarget:
    """Return the server at `url`.

    The URL may end in #MODEL and may omit /v1. Without #MODEL, the server's first model is used.
    Raises UsageError if `url` is no address, BackendError if no server answers there.
    """
    address, _, model = url.partition("#")
    if "://" not in address:
        address = f"http://{address}"
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as e:
        raise UsageError(
            f"{url!r} is not a valid address: {e}", hint="such as http://127.0.0.1:8080/v1"
        ) from e
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not a valid address", hint="such as http://127.0.0.1:8080/v1")
    host = parts.hostname
    if ":" in host:
        host = f"[{host}]"
    if port:
        host = f"{host}:{port}"
    path = parts.path.rstrip("/") or "/v1"
    name = f"{host}#{model}" if model else host
    target = BenchTarget(name, f"{parts.scheme}://{host}{path}", model, key)
    if restart is not None:
        target.restart = partial(_restart, target, restart)
    listed = target.models()
    target.model = model or next(iter(listed), "")
    return target


def _restart(target: BenchTarget, command: str) -> None:
    try:
        subprocess.run(
            shlex.split(command),
            check=True,
            timeout=_RESTART_TIMEOUT_S,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        raise BackendError(f"{target.name} could not be restarted: {e}") from e


def parse_scenarios(text: str, means: Mapping[str, str] = MEANS) -> list[str]:
    """Parse a list of scenarios with commas. Raises UsageError for names that are not in `means`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in means]
    if unknown or not names:
        raise UsageError(
            f"there is no scenario {', '.join(unknown) or text!r}",
            hint=f"the scenarios are {', '.join(means)}",
        )
    return names


def _silent(_: str) -> None:
    """Ignore the report."""


def run(
    targets: Sequence[BenchTarget],
    names: Sequence[str],
    rounds: int,
    report: Callable[[str], None] = _silent,
    make: Callable[[Counter, Tokens | None], Scenarios] = Scenarios,
) -> ScenarioResult:
    """Run the scenarios `names` on all `targets`, `rounds` times.

    The servers take turns in beginning a round. An error on one server is listed in the result and
    does not end the run. `report` gets a line for each step. Raises BackendError if a server does
    not answer at all.
    """
    servers = [target.name for target in targets]
    if len(set(servers)) < len(servers):
        raise UsageError("two servers have the same name", hint=", ".join(servers))
    for target in targets:
        target.wait_ready()
    counter = Counter.for_servers(targets)
    scenarios = make(counter, templated_tokens(targets))
    means = {name: scenarios.means[name] for name in names}
    result = ScenarioResult(servers[0], targets, means, rounds, counter)
    failures: Counted[tuple[str, str]] = Counted()
    for round_index in range(rounds):
        scenarios.round = round_index
        for name in names:
            for target in rotated(targets, round_index):
                scenario_and_server = (name, target.name)
                if failures[scenario_and_server] >= _MAX_FAILURES:
                    continue
                took_s, fault = _run_timed(scenarios, name, target)
                report(
                    f"round {round_index + 1}/{rounds}  {name:8} {target.name:24} {took_s:6.1f} s"
                )
                if fault:
                    result.faults.append(f"{name}, round {round_index + 1}: {fault}")
                    failures[scenario_and_server] += 1
                if (
                    took_s > _MAX_REPEATED_S
                    and failures[scenario_and_server] < _MAX_FAILURES
                    and round_index + 1 < rounds
                ):
                    result.notes.append(
                        f"{name} took {took_s:.0f} s on {target.name}; it is not "
                        "measured in further rounds."
                    )
                    failures[scenario_and_server] = _MAX_FAILURES
    result.tables = scenarios.finished(rounds, servers)
    return result


def _run_timed(scenarios: Scenarios, name: str, target: BenchTarget) -> tuple[float, str]:
    """The seconds that a scenario took, and its error ("" if it succeeded)."""
    started_s = time.monotonic()
    try:
        scenarios.run(name, target)
    except LocalLLMError as e:
        return time.monotonic() - started_s, e.message
    return time.monotonic() - started_s, ""
