"""`localllm bench`: how fast a model really is here, beside what was predicted; the planner learns
from it."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from localllm.cli.bench.measure import ROUNDS, SHORT_PROMPT_TOKENS
from localllm.cli.commands.shared import Json, show
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
    """Measure decode and prefill speed and memory, compare with the prediction, and remember the
    figures.

    With --against, servers are measured instead, in turn: those named, and `localllm serve MODEL`
    if a MODEL is named.
    """
    if against:
        from localllm.cli.bench import against as servers_compared

        compared = servers_compared.compare(model, against, restart_cmd or (), scenarios, rounds)
        show(as_json, compared.to_json(), compared.lines)
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
        figures["power_share"] = power_share  # says nothing of what this machine can do
    else:
        figures.update(compare_and_keep(load, figures))
    show(as_json, figures, lambda: lines(figures))


def lines(figures: dict[str, Any]) -> list[str]:
    """What a person reads of what `--json` prints."""
    decode, short, prefill, memory = (
        figures.get(f"predicted_{name}")
        for name in ("decode_tok_s", "short_tok_s", "prefill_tok_s", "memory_bytes")
    )
    long = f"{figures['prompt_tokens']:,} tokens"
    memory_text = "unknown" if memory is None else gb(memory, 2)
    said = [
        f"decode    {figures['decode_tok_s']:8.1f} tok/s   predicted {_text(decode)}   after a "
        f"prompt of {long}",
        f"          {figures['short_tok_s']:8.1f} tok/s   predicted {_text(short)}   after a "
        f"prompt of {SHORT_PROMPT_TOKENS} tokens",
        f"prefill   {figures['prefill_tok_s']:8.1f} tok/s   predicted {_text(prefill)}   of {long}",
        f"memory    {figures['memory_bytes'] / 1e9:8.2f} GB      predicted {memory_text}",
    ]
    if "power_share" in figures:
        said.append(
            f"paced     computing in {figures['power_share']:.0%} of the time: not compared, and "
            "not remembered"
        )
    if "power" in figures:
        used = figures["power"]
        said.append(
            f"power     {used['watts']:8.1f} W       {used['joules_per_token']:.2f} J a token   "
            f"by {used['source']}"
        )
    return [*said, *(f"slower than predicted? {cause}" for cause in figures.get("causes", ()))]


def _text(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.1f}"
