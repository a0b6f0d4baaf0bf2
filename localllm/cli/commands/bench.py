"""`localllm bench`: measure a model's speed here, and compare it with the prediction.

The planner uses the measurements.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from localllm.cli.bench.measure import ROUNDS, SHORT_PROMPT_TOKENS
from localllm.cli.commands.shared import Json, print_json
from localllm.cli.setting_options import with_setting_options
from localllm.errors import BackendError, UsageError
from localllm.formatting import gb
from localllm.plain_output import print_lines
from localllm.settings import Settings


@with_setting_options("context", "lora", "power")
def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Model to measure (default: the best installed one)."
        ),
    ] = None,
    *,
    settings: Settings,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[#MODEL]",
            help="Compare OpenAI-compatible servers (…/v1) under the same load; may be repeated.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"With --against: number of times each server is measured (default: {ROUNDS}).",
        ),
    ] = None,
    scenarios: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="With --against: scenarios to measure, such as single,four,stall.",
        ),
    ] = None,
    restart_cmd: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="With --against: commands that restart the servers, in the same order.",
        ),
    ] = None,
    earlier: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="FILE", help="Compare with an earlier run: what --json printed."
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="Print the run as one row for others, without any name or path."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure speed and memory of a model, compare with the prediction, and store the results.

    With --against, it compares servers instead: the ones given, and `localllm serve MODEL` if a
    MODEL is named. They are measured in turn.
    """
    from localllm.cli.bench import compare as earlier_runs

    earlier_figures = None
    exclusive_options = {
        "--share": share,
        "--compare": earlier is not None,
        "--against": bool(against),
    }
    chosen_options = [option for option, is_given in exclusive_options.items() if is_given]
    if len(chosen_options) > 1:
        raise UsageError(
            f"{' and '.join(chosen_options)} can't be combined", hint="omit one of them"
        )
    if earlier is not None:
        earlier_figures = earlier_runs.read(earlier)
    if against:
        _compare_servers(
            model, against, restart_cmd or (), scenarios, rounds or ROUNDS, as_json=as_json
        )
        return
    server_options = {"--rounds": rounds, "--scenarios": scenarios, "--restart-cmd": restart_cmd}
    for option, value in server_options.items():
        if value:
            raise UsageError(f"{option} is for --against", hint=f"add --against, or omit {option}")
    from localllm.cli.bench import share as shared
    from localllm.cli.bench.measure import compare_and_store, measure
    from localllm.load.load_plan import load_plan_named

    load = load_plan_named(model, settings)
    if share:
        shared.check_shareable(load)
    report = partial(print, file=sys.stderr, flush=True)
    report(f"measuring {load.name}: {ROUNDS} rounds, more if they disagree …")
    figures = asyncio.run(measure(load, report))
    power_share = load.options.engine.get("power", 1.0)
    if power_share != 1.0:
        figures["power_share"] = power_share  # slowed down on purpose
    else:
        figures.update(compare_and_store(load, figures))
    if earlier_figures is not None:
        figures["compared"] = earlier_runs.compared(earlier_figures, figures)
    if share:
        print(shared.line(shared.row(load, figures)))
        print(shared.HOW_TO_SHARE, file=sys.stderr)
        return
    _print(figures, as_json=as_json)


def _print(figures: dict[str, Any], *, as_json: bool) -> None:
    from localllm.cli.bench import compare as earlier_runs

    if as_json:
        print_json(figures)
        return
    print_lines(lines(figures))
    if "compared" in figures:
        print_lines(["", *earlier_runs.lines(figures["compared"])])


def _compare_servers(
    model: str | None,
    against: Sequence[str],
    restart: Sequence[str],
    scenarios: str | None,
    rounds: int,
    *,
    as_json: bool,
) -> None:
    """Compare servers in turn. Raises BackendError if a measurement failed."""
    from localllm.cli.bench import against as servers_compared

    comparison = servers_compared.compare(model, against, restart, scenarios, rounds)
    if as_json:
        print_json(comparison.to_json())
    else:
        print_lines(comparison.lines())
    if comparison.faults:
        first_fault = comparison.faults[0]
        n_faults = len(comparison.faults)
        raise BackendError(f"{n_faults} measurements failed: {first_fault}")


def lines(figures: dict[str, Any]) -> list[str]:
    """Format the results for display."""
    prompt = f"{figures['prompt_tokens']:,} tokens"
    memory = "unknown"
    if figures.get("predicted_memory_bytes") is not None:
        memory = gb(figures["predicted_memory_bytes"], 2)
    text_lines = [
        f"decode    {_speeds(figures, 'decode_tok_s')}   after a prompt of {prompt}",
        f"          {_speeds(figures, 'short_tok_s')}   "
        f"after a prompt of {SHORT_PROMPT_TOKENS} tokens",
        f"prefill   {_speeds(figures, 'prefill_tok_s')}   of {prompt}",
        f"memory    {figures['memory_bytes'] / 1e9:8.2f} GB      predicted {memory}",
    ]
    if "power_share" in figures:
        share = f"{figures['power_share']:.0%}"
        text_lines.append(
            f"paced     computing in {share} of the time: not compared, and not remembered"
        )
    if "power" in figures:
        power = figures["power"]
        text_lines.append(
            f"power     {power['watts']:8.1f} W       {power['joules_per_token']:.2f} J a token   "
            f"by {power['source']}"
        )
    for cause in figures.get("causes", ()):
        text_lines.append(f"possible reason for a slower result: {cause}")
    return text_lines


def _speeds(figures: dict[str, Any], name: str) -> str:
    """Format the measured and the predicted speed."""
    predicted = figures.get(f"predicted_{name}")
    text = "unknown"
    if predicted is not None:
        text = f"{predicted:.1f}"
    return f"{figures[name]:8.1f} tok/s   predicted {text}"
