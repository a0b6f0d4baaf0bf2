"""`localllm bench`: how fast a model really is here, beside what was predicted; the planner learns
from it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from localllm.cli.bench.measure import ROUNDS, SHORT_PROMPT_TOKENS
from localllm.cli.commands.shared import Json, Lora, Power, print_json
from localllm.formatting import gb
from localllm.load import measurements
from localllm.settings import Settings


def bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="What to measure (default: best at hand)."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Context in tokens (default: what fits).")
    ] = None,
    lora: Lora = None,
    power: Power = None,
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
    share: Annotated[
        Path | None,
        typer.Option(
            "--share",
            metavar="FILE",
            help="Write what was measured here to a file to pass on.",
        ),
    ] = None,
    take_in: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", help="Take in speeds that somebody shared."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure decode and prefill speed and memory, compare with the prediction, and remember the
    figures.

    With --against, servers are measured instead, in turn: those named, and `localllm serve MODEL`
    if a MODEL is named.
    """
    if take_in is not None or (share is not None and model is None):
        _share(share, take_in)
        return
    if against:
        from localllm.cli.bench import against as servers_compared

        compared = servers_compared.compare(model, against, restart_cmd or (), scenarios, rounds)
        servers_compared.show(compared, as_json=as_json)
        return
    from localllm.cli.bench.measure import compare_and_keep, measure
    from localllm.load.load_plan import load_plan_named

    load = load_plan_named(model, Settings({"context": context, "lora": lora, "power": power}))
    print(f"measuring {load.name}: {ROUNDS} rounds, more if they disagree …", file=sys.stderr)
    figures = asyncio.run(measure(load))
    power_share = load.options.engine.get("power", 1.0)
    if power_share != 1.0:
        figures["power_share"] = power_share  # says nothing of what this machine can do
    else:
        figures.update(compare_and_keep(load, figures))
    if share is not None:
        _share(share, None)
    if as_json:
        print_json(figures)
        return
    print("\n".join(lines(figures)))


def _share(export: Path | None, take_in: Path | None) -> None:
    if take_in is not None:
        found = measurements.take_in(take_in)
        machines = ", ".join(sorted({record.machine for record in found}))
        print(f"took in {len(found)} measured runs of {machines}", file=sys.stderr)
        print("see them: localllm recommend --device NAME", file=sys.stderr)
    if export is not None:
        n = measurements.export(export)
        print(f"wrote {n} measured runs of this machine to {export}", file=sys.stderr)


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
    return "unknown" if value is None else f"{value:.1f}"
