"""`localllm bench`: how fast a model really is here, beside what was predicted; the planner learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli.bench.full import second_fastest

if TYPE_CHECKING:
    from localllm.cli.compose.load_plan import LoadPlan
    from localllm.engine.worker.client import WorkerClient

_ROUNDS = 3
# Other programs only ever slow a round down: while the fastest is alone, further rounds are run, within this much.
_MOST_ROUNDS = 8
_MOST_SECONDS = 30.0
_ALONE = 1.05
_DECODE_TOKENS = 64
_PROMPT_TOKENS = 512
# A second answer with next to nothing before it: what it is faster by is attention's, the rest the weights' and layers'.
_SHORT_PROMPT_TOKENS = 16


def bench(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="What to measure (default: best at hand).")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Context in tokens (default: what fits).")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[#MODEL]", help="Compare OpenAI-compatible servers (…/v1) under the same load; may be repeated."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --against: how often each server is measured.")] = _ROUNDS,
    scenarios: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="With --against: what is measured, such as single,four,stall.")
    ] = None,
    restart_cmd: Annotated[
        list[str] | None,
        typer.Option(metavar="COMMAND", help="With --against: how each server is started again, in the same order."),
    ] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Also measure drafting off and on, for prose and for an edit.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Measure every depth, streams, KV types, drafting, restarts (minutes).")
    ] = False,
    to_compare: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="Compare with an earlier run: what --json printed.")
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
        Path | None, typer.Option("--import", metavar="FILE", help="Take in speeds that somebody shared.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure decode and prefill speed and memory, compare with the prediction, and remember the figures.

    With --against, servers are measured instead, in turn: those named, and `localllm serve MODEL` if a MODEL is named.
    """
    import asyncio
    import sys

    from localllm.cli.bench import compare as bench_compare

    if take_in is not None or (share is not None and model is None and not full):
        _share(share, take_in)
        return
    then = bench_compare.read(to_compare) if to_compare is not None else None
    if against:
        from localllm.cli.bench import against as bench_against

        servers = bench_against.Servers(model, against, tuple(restart_cmd or ()))
        bench_against.show(bench_against.compare(servers, scenarios, rounds), as_json=as_json)
        return
    from localllm.cli.compose.load_plan import load_plan_named
    from localllm.settings import Settings

    load = load_plan_named(model, Settings({"context": context}))
    print(f"measuring {load.name}: {_ROUNDS} rounds, more if they disagree …", file=sys.stderr)
    figures = asyncio.run(_measure(load, speculation=speculation))
    if full:
        figures["full"] = _full(load)
    figures.update(_compare_and_keep(load, figures))
    if then is not None:
        figures["compared"] = bench_compare.compared(then, figures)
    if share is not None:
        _share(share, None)
    if as_json:
        import json

        print(json.dumps(figures, indent=1))
        return
    print("\n".join(lines(figures)))


def _full(load: LoadPlan) -> dict[str, Any]:
    import asyncio
    import sys

    from localllm.cli.bench.full import Sweep

    return asyncio.run(Sweep(load, lambda text: print(f"  {text} …", file=sys.stderr, flush=True)).run())


def lines(figures: dict[str, Any]) -> list[str]:
    """What a person reads of what `--json` prints."""
    from localllm.cli.bench import compare as bench_compare
    from localllm.cli.bench import full as bench_full
    from localllm.cli.bench import speculation as bench_speculation

    decode, short, prefill, memory = (
        figures.get(f"predicted_{name}") for name in ("decode_tok_s", "short_tok_s", "prefill_tok_s", "memory_bytes")
    )
    long = f"{figures['prompt_tokens']:,} tokens"
    said = [
        f"decode    {figures['decode_tok_s']:8.1f} tok/s   predicted {_text(decode)}   after a prompt of {long}",
        f"          {figures['short_tok_s']:8.1f} tok/s   predicted {_text(short)}   after a prompt of {_SHORT_PROMPT_TOKENS} tokens",
        f"prefill   {figures['prefill_tok_s']:8.1f} tok/s   predicted {_text(prefill)}   of {long}",
        f"memory    {figures['memory_bytes'] / 1e9:8.2f} GB      predicted {_gb(memory)}",
    ]
    if "full" in figures:
        said += bench_full.table(figures["full"])
    spoken = figures.get("speculation") or figures.get("full", {}).get("speculation")
    if spoken is not None:
        said += bench_speculation.table(spoken)
    if "compared" in figures:
        said += ["", *bench_compare.table(figures["compared"])]
    return [*said, *(f"slower than predicted? {cause}" for cause in figures.get("causes", ()))]


def _share(export: Path | None, take_in: Path | None) -> None:
    import sys

    from localllm.cli.compose import measurements

    if take_in is not None:
        found = measurements.take_in(take_in)
        machines = ", ".join(sorted({record.machine for record in found}))
        print(f"took in {len(found)} measured runs of {machines}", file=sys.stderr)
        print("see them: localllm recommend --device NAME", file=sys.stderr)
    if export is not None:
        n = measurements.export(export)
        print(f"wrote {n} measured runs of this machine to {export}", file=sys.stderr)


def _text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _gb(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 1e9:.2f} GB"


async def _measure(load: LoadPlan, *, speculation: bool) -> dict[str, Any]:
    from dataclasses import replace

    from localllm.cli.bench import speculation as bench_speculation
    from localllm.engine.worker.supervisor import Supervisor

    options = load.options
    # Whatever the settings say: each request then says whether it wants drafts.
    if speculation and options.engine.get("draft") != "mtp":
        options = replace(options, engine={**options.engine, "draft": "auto"})
    supervisor = Supervisor(options)
    try:
        engine = await supervisor.engine()
        n_prompt = min(_PROMPT_TOKENS, engine.info.n_ctx // 2)
        await _round(engine, 0, n_prompt)
        short, decoded, prefilled = await _rounds(engine, n_prompt)
        figures: dict[str, Any] = {
            "decode_tok_s": second_fastest(decoded),
            "short_tok_s": second_fastest(short),
            "prefill_tok_s": second_fastest(prefilled),
            "prompt_tokens": n_prompt,
            "rounds": len(decoded),
            "memory_bytes": engine.memory.total_bytes,
            "n_ctx": engine.info.n_ctx,
            "n_batch": engine.info.n_batch,
        }
        if speculation:
            figures["speculation"] = await bench_speculation.measure(engine, _ROUNDS)
        return figures
    finally:
        await supervisor.close()


async def _rounds(engine: WorkerClient, n_prompt: int) -> tuple[list[float], list[float], list[float]]:
    """Decode after a few tokens, decode and prefill of `n_prompt` tokens, in tokens/s, round by round."""
    import time

    short: list[float] = []
    decoded: list[float] = []
    prefilled: list[float] = []
    started = time.monotonic()
    for i in range(max(_ROUNDS, _MOST_ROUNDS)):
        disagree = any(max(rates) > _ALONE * second_fastest(rates) for rates in (short, decoded) if rates)
        if i >= _ROUNDS and (not disagree or time.monotonic() - started > _MOST_SECONDS):
            break
        # In turn, so that a busy minute falls on both.
        short.append((await _round(engine, 2 * i + 1, _SHORT_PROMPT_TOKENS))[0])
        rate, prefill = await _round(engine, 2 * i + 2, n_prompt)
        decoded.append(rate)
        prefilled.append(prefill)
    return short, decoded, prefilled


async def _round(engine: WorkerClient, seed: int, n: int) -> tuple[float, float]:
    """(decode, prefill) in tokens/s of one request of `n` prompt tokens no cache has seen."""
    from localllm.cli.bench.answer import answer, prompt_of

    run = await answer(engine, str(seed), prompt_of(engine, seed, n), _DECODE_TOKENS)
    return run.decode_tok_s, run.prefill_tok_s


def _compare_and_keep(load: LoadPlan, figures: dict[str, Any]) -> dict[str, Any]:
    """Predicted figures and likely causes of a shortfall; the run becomes a record the planner reads."""
    import datetime

    from localllm.cli.compose import measurements
    from localllm.device.detect import detect
    from localllm.library.catalog import load_catalog
    from localllm.planner.speed import Measured
    from localllm.planner.verify import compare

    plan = load.plan
    if plan is None:
        return {}
    device, ran = detect(measure=True), plan.settings
    record = measurements.Record(
        machine=device.name, model=plan.model.id, quant=plan.variant.quant, backend=plan.backend,
        decode_tok_s=figures["decode_tok_s"], depth=figures["prompt_tokens"] + _DECODE_TOKENS // 2, kv_type=ran.kv_type,
        prefill_tok_s=figures["prefill_tok_s"], prompt_tokens=figures["prompt_tokens"], file_bytes=plan.variant.file_bytes,
        n_ctx=ran.n_ctx, slots=ran.slots, n_ubatch=ran.n_batch, memory_bytes=int(figures["memory_bytes"]),
        predicted_memory_bytes=plan.memory.total_bytes, date=datetime.date.today().isoformat(), file=str(load.local.path),
        short_tok_s=figures["short_tok_s"], short_depth=_SHORT_PROMPT_TOKENS + _DECODE_TOKENS // 2,
        gpu_layers=ran.placement.gpu_layers, experts_on_host=ran.placement.experts_on_host, kv_on_host=ran.placement.kv_on_host,
        layout=ran.placement.layout,
    )  # fmt: skip
    run = Measured(
        plan.model, plan.variant, plan.backend, record.decode_tok_s, record.depth, record.kv_type, record.prefill_tok_s,
        record.prompt_tokens, record.date, record.short_tok_s, record.short_depth, placement=ran.placement, n_batch=ran.n_batch,
    )  # fmt: skip
    # What other models taught about this machine counts; this model's own runs would only be compared with themselves.
    known = [o for o in measurements.load() if o.model != record.model]
    others = measurements.for_planner(known, device.name, load_catalog().by_id)
    result = compare(
        device, run, others, memory_bytes=record.memory_bytes, predicted_memory_bytes=record.predicted_memory_bytes
    )
    measurements.keep(record)
    return {
        "predicted_decode_tok_s": result.decode[0],
        "predicted_short_tok_s": None if result.decode_short is None else result.decode_short[0],
        "predicted_prefill_tok_s": plan.prefill_tok_s.value,
        "predicted_memory_bytes": plan.memory.total_bytes,
        "basis": result.basis,
        "causes": list(result.causes),
    }
