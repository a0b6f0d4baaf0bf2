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
_MAX_RATIO_TO_SECOND = 1.05
DECODE_TOKENS = 64
PROMPT_TOKENS = 512
# A second answer after a very short prompt. The difference in speed is the cost of attention; the
# rest is the cost of weights and layers.
SHORT_PROMPT_TOKENS = 16
# Batteries and GPUs update their power readings a few times per second.
_MIN_POWER_S = 3.0


async def measure(load: LoadPlan, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure the speed and memory of the model in its own worker. Each round is passed to
    `report`."""
    from localllm.engine.worker.supervisor import Supervisor

    supervisor = Supervisor(load.options)
    try:
        engine = await supervisor.engine()
        n_prompt = min(PROMPT_TOKENS, engine.info.n_ctx // 2)
        await _timed_request(engine, 0, n_prompt)
        short_rates, decode_rates, prefill_rates = await _all_rounds(engine, n_prompt, report)
        half_answer = DECODE_TOKENS // 2
        figures: dict[str, Any] = {
            "decode_tok_s": second_fastest(decode_rates),
            "depth": n_prompt + half_answer,
            "short_tok_s": second_fastest(short_rates),
            "short_depth": SHORT_PROMPT_TOKENS + half_answer,
            "prefill_tok_s": second_fastest(prefill_rates),
            "prompt_tokens": n_prompt,
            "rounds": len(decode_rates),
        }
        figures |= {
            "memory_bytes": engine.memory.total_bytes,
            "n_ctx": engine.info.n_ctx,
            "n_batch": engine.info.n_batch,
        }
        power = await _power(engine)
        if power is None:
            return figures
        return {**figures, "power": power}
    finally:
        await supervisor.close()


def second_fastest(rates: Sequence[float]) -> float:
    """Return the median of three rounds. Of more rounds, return the second fastest, to skip a lucky
    one."""
    return sorted(rates)[-2:][0]


async def _all_rounds(
    engine: WorkerClient, n_prompt: int, report: Callable[[str], None]
) -> tuple[list[float], list[float], list[float]]:
    """Return speeds in tokens/s, one per round: decode after a short prompt, decode and prefill
    after `n_prompt` tokens."""
    short_rates: list[float] = []
    decode_rates: list[float] = []
    prefill_rates: list[float] = []
    started_s = time.monotonic()
    for n_done in range(max(ROUNDS, _MAX_ROUNDS)):
        rounds_disagree = any(
            max(rates) > _MAX_RATIO_TO_SECOND * second_fastest(rates)
            for rates in (short_rates, decode_rates)
            if rates
        )
        if n_done >= ROUNDS and (
            not rounds_disagree or time.monotonic() - started_s > _MAX_SECONDS
        ):
            break
        # Alternate, so that interference from other programs affects both.
        rate, _ = await _timed_request(engine, 2 * n_done + 1, SHORT_PROMPT_TOKENS)
        short_rates.append(rate)
        rate, prefill = await _timed_request(engine, 2 * n_done + 2, n_prompt)
        decode_rates.append(rate)
        prefill_rates.append(prefill)
        report(f"  round {n_done + 1}: decode {rate:.1f} tok/s, prefill {prefill:,.0f} tok/s")
    return short_rates, decode_rates, prefill_rates


async def _power(engine: WorkerClient) -> dict[str, Any] | None:
    """Measure watts and joules per decoded token over `_MIN_POWER_S`. None if this machine has no
    meter."""
    from localllm.device.probes.power import PowerMeter, counters

    if not counters():
        return None
    n_tokens = 0
    started_s = time.monotonic()
    with PowerMeter() as meter:
        while time.monotonic() - started_s < _MIN_POWER_S:
            await _timed_request(engine, 1000 + n_tokens, SHORT_PROMPT_TOKENS)
            n_tokens += DECODE_TOKENS
    energy = meter.use
    if energy is None:
        return None
    return {
        "watts": energy.watts,
        "joules_per_token": energy.joules / n_tokens,
        "source": energy.source,
    }


async def _timed_request(engine: WorkerClient, seed: int, n_prompt: int) -> tuple[float, float]:
    """Return (decode, prefill) speeds in tokens/s of one greedy request without drafts.

    The prompt of `n_prompt` tokens is in no cache. Raises the LocalLLMError of a failed request.
    """
    from localllm.engine.messages import Failure, Generation, Request, Sampling
    from localllm.errors import by_code

    n_vocab = engine.info.n_vocab
    prompt = [5 + (seed * 7919 + i * 104729) % (n_vocab - 10) for i in range(n_prompt)]
    greedy = Generation(
        Sampling(temperature=0.0), DECODE_TOKENS, ignore_eos=True, cache_prompt=False
    )
    request = Request(f"bench-{seed}", prompt, greedy, draft="off")
    end = await engine.listen(request, _ignore_event)
    if isinstance(end, Failure):
        raise by_code(end.code, end.message, hint=end.hint)
    timings = end.timings
    return (end.usage.completion_tokens - 1) / timings.decode_s, n_prompt / timings.prefill_s


def _ignore_event(_event: object) -> None:
    """Ignore the text of a measured answer."""


def compare_and_store(load: LoadPlan, figures: dict[str, Any]) -> dict[str, Any]:
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
    settings = plan.settings
    record = measurements.Record(
        machine=device.name,
        model=plan.model.id,
        quant=plan.variant.quant,
        backend=plan.backend,
        decode_tok_s=figures["decode_tok_s"],
        depth=figures["depth"],
        kv_type=settings.kv_type,
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
        n_ctx=settings.n_ctx,
        slots=settings.slots,
        n_ubatch=settings.n_batch,
    )
    placement = settings.placement
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
    records = [earlier for earlier in measurements.load() if earlier.model != record.model]
    other_runs = measurements.for_planner(records, device.name, load_catalog().by_id)
    comparison = compare(device, run, other_runs)
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
    predicted_short = None
    if comparison.decode_short is not None:
        predicted_short = comparison.decode_short[0]
    return {
        "predicted_decode_tok_s": comparison.decode[0],
        "predicted_short_tok_s": predicted_short,
        "predicted_prefill_tok_s": plan.prefill_tok_s.value,
        "predicted_memory_bytes": plan.memory.total_bytes,
        "basis": comparison.basis,
        "causes": list(comparison.causes),
    }
