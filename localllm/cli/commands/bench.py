"""`localllm bench`: measure a model's speed here, and compare it with the prediction.

The planner uses the measurements.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from localllm.cli.bench.measure import ROUNDS, SHORT_PROMPT_TOKENS
from localllm.cli.commands.shared import Json, print_json, print_lines
from localllm.cli.setting_options import takes
from localllm.errors import BackendError
from localllm.formatting import gb
from localllm.settings import Settings


@takes("context", "lora", "power")
def bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="What to measure (default: best at hand)."),
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
        int, typer.Option(min=1, help="With --against: how often each server is measured.")
    ] = ROUNDS,
    scenarios: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…", help="With --against: what is measured, such as single,four,stall."
        ),
    ] = None,
    restart_cmd: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="With --against: how each server is started again, in the same order.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure speed and memory of a model, compare with the prediction, and store the results.

    With --against, it compares servers instead: the ones given, and `localllm serve MODEL` if a
    MODEL is named. They are measured in turn.
    """
    if against:
        from localllm.cli.bench import against as servers_compared

        compared = servers_compared.compare(model, against, restart_cmd or (), scenarios, rounds)
        if as_json:
            print_json(compared.to_json())
        else:
            print_lines(compared.lines())
        if compared.faults:
            first = compared.faults[0]
            n = len(compared.faults)
            raise BackendError(f"{n} measurements failed: {first}")
        return
    from localllm.cli.bench.measure import compare_and_keep, measure
    from localllm.load.load_plan import load_plan_named

    load = load_plan_named(model, settings)
    print(f"measuring {load.name}: {ROUNDS} rounds, more if they disagree …", file=sys.stderr)
    figures = asyncio.run(measure(load))
    power_share = load.options.engine.get("power", 1.0)
    if power_share != 1.0:
        figures["power_share"] = power_share  # slowed down on purpose
    else:
        figures.update(compare_and_keep(load, figures))
    if as_json:
        print_json(figures)
    else:
        print_lines(lines(figures))


def lines(figures: dict[str, Any]) -> list[str]:
    """Format the results for display."""
    prompt = f"{figures['prompt_tokens']:,} tokens"
    memory = "unknown"
    if figures.get("predicted_memory_bytes") is not None:
        memory = gb(figures["predicted_memory_bytes"], 2)
    said = [
        f"decode    {_speeds(figures, 'decode_tok_s')}   after a prompt of {prompt}",
        f"          {_speeds(figures, 'short_tok_s')}   "
        f"after a prompt of {SHORT_PROMPT_TOKENS} tokens",
        f"prefill   {_speeds(figures, 'prefill_tok_s')}   of {prompt}",
        f"memory    {figures['memory_bytes'] / 1e9:8.2f} GB      predicted {memory}",
    ]
    if "power_share" in figures:
        share = f"{figures['power_share']:.0%}"
        said.append(f"paced     computing in {share} of the time: not compared, and not remembered")
    if "power" in figures:
        used = figures["power"]
        said.append(
            f"power     {used['watts']:8.1f} W       {used['joules_per_token']:.2f} J a token   "
            f"by {used['source']}"
        )
    for cause in figures.get("causes", ()):
        said.append(f"slower than predicted? {cause}")
    return said


def _speeds(figures: dict[str, Any], name: str) -> str:
    """Format the measured and the predicted speed."""
    predicted = figures.get(f"predicted_{name}")
    text = "unknown"
    if predicted is not None:
        text = f"{predicted:.1f}"
    return f"{figures[name]:8.1f} tok/s   predicted {text}"
