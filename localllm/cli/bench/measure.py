"""`localllm bench`: measure decode, prefill and memory of one model, and compare with the
prediction.

The planner uses the results.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localllm.engine.worker.client import WorkerClient
    from localllm.load.load_plan import LoadPlan

ROUNDS = 3
# Other programs can only slow a round down. If only the fastest round is fast, further rounds are
# run, within these limits.
_MAX_ROUNDS = 8
_MAX_SECONDS = 30.0
_ALONE = 1.05
DECODE_TOKENS = 64
PROMPT_TOKENS = 512
# A second answer after a very short prompt. The difference in speed is the cost of attention; the
# rest is the cost of weights and layers.
SHORT_PROMPT_TOKENS = 16
# Batteries and GPUs update their power readings a few times per second.
_POWER_S = 3.0


async def measure(load: LoadPlan, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure the speed and memory of the model in its own worker. Each round is passed to
    `report`."""
    from localllm.engine.worker.supervisor import Supervisor

    supervisor = Supervisor(load.options)
    try:
        engine = await supervisor.engine()
        n_prompt = min(PROMPT_TOKENS, engine.info.n_ctx // 2)
        await _round(engine, 0, n_prompt)
        short, decoded, prefilled = await _rounds(engine, n_prompt, report)
        half_answer = DECODE_TOKENS // 2
        figures: dict[str, Any] = {
            "decode_tok_s": second_fastest(decoded),
            "depth": n_prompt + half_answer,
            "short_tok_s": second_fastest(short),
            "short_depth": SHORT_PROMPT_TOKENS + half_answer,
            "prefill_tok_s": second_fastest(prefilled),
            "prompt_tokens": n_prompt,
            "rounds": len(decoded),
        }
        figures |= {
            "memory_bytes": engine.memory.total_bytes,
            "n_ctx": engine.info.n_ctx,
            "n_batch": engine.info.n_batch,
        }
        used = await _power(engine)
        if used is None:
            return figures
        return {**figures, "power": used}
    finally:
        await supervisor.close()


def second_fastest(rates: Sequence[float]) -> float:
    """Return the median of three rounds. Of more rounds, return the second fastest, to skip a lucky
    one."""
    return sorted(rates)[-2:][0]


async def _rounds(
    engine: WorkerClient, n_prompt: int, report: Callable[[str], None]
) -> tuple[list[float], list[float], list[float]]:
    """Return speeds in tokens/s, one per round: decode after a short prompt, decode and prefill
    after `n_prompt` tokens."""
    short: list[float] = []
    decoded: list[float] = []
    prefilled: list[float] = []
    started = time.monotonic()
    for i in range(max(ROUNDS, _MAX_ROUNDS)):
        disagree = any(
            max(rates) > _ALONE * second_fastest(rates) for rates in (short, decoded) if rates
        )
        if i >= ROUNDS and (not disagree or time.monotonic() - started > _MAX_SECONDS):
            break
        # Alternate, so that interference from other programs affects both.
        rate, _ = await _round(engine, 2 * i + 1, SHORT_PROMPT_TOKENS)
        short.append(rate)
        rate, prefill = await _round(engine, 2 * i + 2, n_prompt)
        decoded.append(rate)
        prefilled.append(prefill)
        report(f"  round {i + 1}: decode {rate:.1f} tok/s, prefill {prefill:,.0f} tok/s")
    return short, decoded, prefilled


async def _power(engine: WorkerClient) -> dict[str, Any] | None:
    """Measure watts and joules per decoded token over `_POWER_S`. None if this machine has no
    meter."""
    from localllm.device.probes.power import PowerMeter, counters

    if not counters():
        return None
    tokens = 0
    began_s = time.monotonic()
    with PowerMeter() as meter:
        while time.monotonic() - began_s < _POWER_S:
            await _round(engine, 1000 + tokens, SHORT_PROMPT_TOKENS)
            tokens += DECODE_TOKENS
    use = meter.use
    if use is None:
        return None
    return {"watts": use.watts, "joules_per_token": use.joules / tokens, "source": use.source}


async def _round(engine: WorkerClient, seed: int, n: int) -> tuple[float, float]:
    """Return (decode, prefill) speeds in tokens/s of one greedy request without drafts.

    The prompt of `n` tokens is in no cache. Raises the LocalLLMError of a failed request.
    """
    from localllm.engine.messages import Failure, Generation, Request, Sampling
    from localllm.errors import by_code

    n_vocab = engine.info.n_vocab
    prompt = [5 + (seed * 7919 + i * 104729) % (n_vocab - 10) for i in range(n)]
    greedy = Generation(
        Sampling(temperature=0.0), DECODE_TOKENS, ignore_eos=True, cache_prompt=False
    )
    request = Request(f"bench-{seed}", prompt, greedy, draft="off")
    end = await engine.listen(request, _ignore)
    if isinstance(end, Failure):
        raise by_code(end.code, end.message, hint=end.hint)
    times = end.timings
    return (end.usage.completion_tokens - 1) / times.decode_s, n / times.prefill_s


def _ignore(_event: object) -> None:
    """Ignore the text of a measured answer."""


def compare_and_keep(load: LoadPlan, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the predicted speeds and the likely causes of a shortfall.

    The run is stored as a record for the planner.
    """
    from localllm.device.detect import detect
    from localllm.library.catalog import load_catalog
    from localllm.load import measurements
    from localllm.planner.verify import compare

    plan = load.plan
    if plan is None:
        return {}
    device = detect(measure=True)
    ran = plan.settings
    record = measurements.Record(
        machine=device.name,
        model=plan.model.id,
        quant=plan.variant.quant,
        backend=plan.backend,
        decode_tok_s=figures["decode_tok_s"],
        depth=figures["depth"],
        kv_type=ran.kv_type,
        prefill_tok_s=figures["prefill_tok_s"],
        prompt_tokens=figures["prompt_tokens"],
        memory_bytes=int(figures["memory_bytes"]),
        short_tok_s=figures["short_tok_s"],
        short_depth=figures["short_depth"],
    )
    record = replace(
        record,
        file=str(load.local.path),
        file_bytes=plan.variant.file_bytes,
        date=datetime.date.today().isoformat(),
        n_ctx=ran.n_ctx,
        slots=ran.slots,
        n_ubatch=ran.n_batch,
    )
    placement = ran.placement
    record = replace(
        record,
        gpu_layers=placement.gpu_layers,
        experts_on_host=placement.experts_on_host,
        kv_on_host=placement.kv_on_host,
        layout=placement.layout,
    )
    run = measurements.as_measured(record, plan.model, plan.variant)
    # Measurements of other models on this machine count. Earlier runs of this model would only be
    # compared with themselves.
    known = [o for o in measurements.load() if o.model != record.model]
    others = measurements.for_planner(known, device.name, load_catalog().by_id)
    result = compare(device, run, others)
    try:
        # An adapter's compute cost does not belong to the model's own speed.
        if not plan.variant.adapter_bytes:
            measurements.keep(record)
    except OSError as e:
        file = measurements.path()
        print(
            f"the planner does not learn from this: {file} can't be written: {e.strerror}",
            file=sys.stderr,
        )
    short = None
    if result.decode_short is not None:
        short = result.decode_short[0]
    return {
        "predicted_decode_tok_s": result.decode[0],
        "predicted_short_tok_s": short,
        "predicted_prefill_tok_s": plan.prefill_tok_s.value,
        "predicted_memory_bytes": plan.memory.total_bytes,
        "basis": result.basis,
        "causes": list(result.causes),
    }
