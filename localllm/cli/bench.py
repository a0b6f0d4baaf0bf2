"""`localllm bench`: how fast a model really is here, beside what was predicted; the planner learns from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localllm.cli.launch import Launch
    from localllm.engine.client import WorkerClient

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
        str | None,
        typer.Option(metavar="URL", help="Also measure an OpenAI-compatible server (…/v1) on the same text."),
    ] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Also measure drafting off and on, for prose and for an edit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure decode and prefill speed and memory, compare with the prediction, and remember the figures."""
    import asyncio
    import sys

    from localllm.cli.launch import prepare
    from localllm.settings import Settings

    launch = prepare(model, Settings({"context": context}))
    print(f"measuring {launch.name}: {_ROUNDS} rounds, more if they disagree …", file=sys.stderr)
    figures = asyncio.run(_measure(launch, speculation=speculation))
    if against is not None:
        figures["against"] = {"url": against, **_other(against)}
    figures.update(_compare_and_keep(launch, figures))
    if as_json:
        import json

        print(json.dumps(figures, indent=1))
        return
    print(f"decode    {figures['decode_tok_s']:8.1f} tok/s   predicted {_text(figures.get('predicted_decode_tok_s'))}")
    print(f" empty    {figures['short_tok_s']:8.1f} tok/s   predicted {_text(figures.get('predicted_short_tok_s'))}")
    print(
        f"prefill   {figures['prefill_tok_s']:8.1f} tok/s   predicted {_text(figures.get('predicted_prefill_tok_s'))}"
    )
    print(
        f"memory    {figures['memory_bytes'] / 1e9:8.2f} GB      predicted {_gb(figures.get('predicted_memory_bytes'))}"
    )
    if "speculation" in figures:
        from localllm.cli import bench_speculation

        print("\n".join(bench_speculation.table(figures["speculation"])))
    if "against" in figures:
        other = figures["against"]
        print(f"{against}: decode {other['decode_tok_s']:.1f} tok/s, first token after {other['ttft_s']:.2f} s")
    for cause in figures.get("causes", ()):
        print(f"slower than predicted? {cause}")


def _text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _gb(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 1e9:.2f} GB"


async def _measure(launch: Launch, *, speculation: bool) -> dict[str, Any]:
    from dataclasses import replace

    from localllm.cli import bench_speculation
    from localllm.engine.supervisor import Supervisor

    options = launch.options
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


def second_fastest(rates: Sequence[float]) -> float:
    """Of three rounds the median; of more, what the machine does when left alone, without the one lucky round."""
    return sorted(rates)[-2:][0]


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
    from localllm.engine.messages import Failure, Finish, Generation, Request, Sampling
    from localllm.errors import by_code

    prompt = [5 + (seed * 7919 + i * 104729) % (engine.info.n_vocab - 10) for i in range(n)]
    greedy = Generation(Sampling(temperature=0.0), _DECODE_TOKENS, ignore_eos=True, cache_prompt=False)
    request = Request(f"bench-{seed}", prompt, greedy, draft="off")
    async for event in engine.submit(request):
        if isinstance(event, Failure):
            raise by_code(event.code, event.message, hint=event.hint)
        if isinstance(event, Finish):
            timings = event.timings
            return (event.usage.completion_tokens - 1) / timings.decode_s, n / timings.prefill_s
    raise by_code("backend_error", "the measurement ended without a result")


def _compare_and_keep(launch: Launch, figures: dict[str, Any]) -> dict[str, Any]:
    """Predicted figures and likely causes of a shortfall; the run becomes a record the planner reads."""
    import datetime

    from localllm.cli import measurements
    from localllm.device.detect import detect
    from localllm.library.catalog import load_catalog
    from localllm.planner.speed import Measured
    from localllm.planner.verify import compare

    plan = launch.plan
    if plan is None:
        return {}
    device, ran = detect(measure=True), plan.settings
    record = measurements.Record(
        machine=device.name, model=plan.model.id, quant=plan.variant.quant, backend=plan.backend,
        decode_tok_s=figures["decode_tok_s"], depth=figures["prompt_tokens"] + _DECODE_TOKENS // 2, kv_type=ran.kv_type,
        prefill_tok_s=figures["prefill_tok_s"], prompt_tokens=figures["prompt_tokens"], file_bytes=plan.variant.file_bytes,
        n_ctx=ran.n_ctx, slots=ran.slots, n_ubatch=ran.n_batch, memory_bytes=int(figures["memory_bytes"]),
        predicted_memory_bytes=plan.memory.total_bytes, date=datetime.date.today().isoformat(), file=str(launch.local.path),
        short_tok_s=figures["short_tok_s"], short_depth=_SHORT_PROMPT_TOKENS + _DECODE_TOKENS // 2,
    )  # fmt: skip
    run = Measured(
        plan.model, plan.variant, plan.backend, record.decode_tok_s, record.depth, record.kv_type, record.prefill_tok_s,
        record.prompt_tokens, record.date, record.short_tok_s, record.short_depth,
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


def _other(url: str) -> dict[str, float]:
    """Decode tok/s and TTFT of another server on a prompt of the same length."""
    import json
    import time

    import httpx

    from localllm.errors import BackendError

    words = " ".join(f"w{i * 104729 % 9973}" for i in range(_PROMPT_TOKENS // 4))
    body = {
        "model": "", "messages": [{"role": "user", "content": words}], "max_tokens": _DECODE_TOKENS, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    started, times = time.perf_counter(), []
    try:
        with httpx.stream("POST", url.rstrip("/") + "/chat/completions", json=body, timeout=300) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices") or [{}]
                    if choices[0].get("delta", {}).get("content"):
                        times.append(time.perf_counter())
    except (httpx.HTTPError, ValueError) as e:
        raise BackendError(
            f"{url} did not answer as an OpenAI-compatible server: {e}", hint="give its …/v1 address"
        ) from e
    if len(times) < 2:
        raise BackendError(f"{url} answered with {len(times)} pieces of text: too few to measure")
    return {"decode_tok_s": (len(times) - 1) / (times[-1] - times[0]), "ttft_s": times[0] - started}
