"""Predict how fast a model answers: decode, prefill, time to first token and loading, each with its
range and basis.

The predictions of the two cost models (decode_cost.py, prefill_cost.py) are adjusted by
measurements on this machine (calibration.py). Units: tokens/s and seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from localllm.device.types import Device
from localllm.planner import (
    by_others,
    calibration,
    decode_cost,
    efficiency,
    layer_bytes,
    prefill_cost,
    ranges,
)
from localllm.planner.bytes_per_token import streamed
from localllm.planner.types import USUAL, Range, RunSettings, backend_of
from localllm_backends.placement import Placement
from localllm_catalog.types import Model, Variant

ASSUMED_DISK_BYTES_S = 1.5e9
_Z90 = 1.28  # 10th to 90th percentile
# How far figures on one machine differ from each other, and how far a model differs from the
# prediction by other models' figures (ln). A model's own figure is taken as it is.
_OTHER_NOISE = 0.05
_OWN_NOISE = 0.01
_MODEL_SPREAD = 0.10
# Files of one quant whose sizes differ by less are the same file.
_SAME_SIZE = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    """Speeds measured with one variant. A speed of 0 was not measured.

    - `depth`: mean context while decoding.
    - `short_tok_s` at `short_depth`: decode speed with the context nearly empty. The difference to
      `decode_tok_s` is due to attention.
    - `placement`: where the model was.
    - `n_batch`: the micro-batch of its prompt (tokens).
    - `source`: who measured it on another machine of this kind ("": measured on this machine).
    """

    model: Model
    variant: Variant
    backend: str
    decode_tok_s: float
    depth: int = 0
    kv_type: str = "f16"
    prefill_tok_s: float = 0.0
    prompt_tokens: int = 0
    short_tok_s: float = 0.0
    short_depth: int = 0
    placement: Placement = USUAL.placement
    n_batch: int = USUAL.n_batch
    source: str = ""

    @property
    def run(self) -> RunSettings:
        """Its settings, as far as they affect the speed."""
        return replace(USUAL.with_kv_type(self.kv_type), placement=self.placement)

    @property
    def decoded(self) -> tuple[tuple[int, float], ...]:
        """(depth, tokens/s) of each decode figure."""
        rates = []
        if self.short_tok_s > 0:
            rates.append((self.short_depth, self.short_tok_s))
        if self.decode_tok_s > 0:
            rates.append((self.depth, self.decode_tok_s))
        return tuple(rates)


def decode_bound(
    device: Device, model: Model, variant: Variant, *, depth: int = 0, kv_type: str = "f16"
) -> float:
    """Return the tokens/s that no engine can exceed: bandwidth ÷ (active weight bytes + KV bytes
    read at `depth`)."""
    read = streamed(model, variant).total_bytes + decode_cost.kv_read_bytes(model, depth, kv_type)
    return device.bandwidth_gbps.value * 1e9 / read


@lru_cache(4096)
def _basis(
    cost_model: str, hardware: decode_cost.Hardware, kind: str, *, depth: int, evidence: str = ""
) -> tuple[str, float]:
    """Return the basis of a prediction by that cost model for "MoE" or "dense" models, and its
    standard deviation in ln. `evidence` replaces the table's evidence about the machine."""
    table = efficiency.load()[cost_model]
    evidence = evidence or ranges.evidence(table.rows, hardware.keys)
    width = ranges.width_of(table.width, evidence, hardware.keys, kind, depth)
    spread = width / _Z90
    key, n_rows = table.nearest(hardware.keys)
    if n_rows == 0:
        return f"formula: no {hardware.engine} measurement of this kind of machine, {kind}", spread
    return f"table: {key.removeprefix('part:')} × {kind}, n={n_rows}", spread


def _kind(model: Model) -> str:
    return "MoE" if model.experts is not None else "dense"


def _range(value: float, spread: float, basis: str) -> Range:
    return Range(value, value * math.exp(-_Z90 * spread), value * math.exp(_Z90 * spread), basis)


def decode(
    device: Device,
    model: Model,
    variant: Variant,
    settings: RunSettings = USUAL,
    *,
    depth: int = 0,
    n_sequences: int = 1,
    measured: Sequence[Measured] = (),
) -> Range:
    """Return the predicted decode speed of one of `n_sequences` at `depth` tokens of context,
    tokens/s.

    Layers that `settings` keep in host memory run there, and the times add up. Figures of this
    machine in `measured` replace the table. A figure of the same variant is adjusted to this depth;
    other variants contribute their ratio. Figures of others count if this machine has none, and only
    those of the same file.
    """
    step = decode_step(device, model, variant, settings, depth=depth, n_sequences=n_sequences)
    backend = backend_of(variant).name
    runs = [run for run in measured if run.backend == backend and run.decoded]
    runs_here = [run for run in runs if not run.source]
    if not runs_here:

        def of_run(m: Measured) -> list[tuple[float, float]]:
            return [
                (rate, 1 / decode_step(device, model, variant, m.run, depth=run_depth).total_s)
                for run_depth, rate in m.decoded
            ]

        predicted = _range(1 / step.total_s, step.spread, step.basis)
        found = _with_others(predicted, step.spread, _same_file(runs, model, variant), of_run)
        return efficiency.under_lasting_load(device, found)
    seconds, spread, names = _adjusted(device, model, variant, step, runs_here)
    return _range(1 / seconds, spread, f"measured here: {names}")


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step in seconds by cause, and its uncertainty. `routed_s` is the part of `weights_s`
    for routed experts."""

    weights_s: float
    fixed_s: float
    attention_s: float
    spread: float
    basis: str
    routed_s: float = 0.0

    @property
    def parts(self) -> calibration.Parts:
        return self.weights_s, self.fixed_s, self.attention_s

    @property
    def total_s(self) -> float:
        return sum(self.parts)


def decode_step(
    device: Device,
    model: Model,
    variant: Variant,
    settings: RunSettings,
    *,
    depth: int = 0,
    n_sequences: int = 1,
) -> DecodeStep:
    device = layer_bytes.with_used_cards(device, settings.placement)
    machine = hardware(device, variant, settings)
    terms = partial(
        decode_cost.decode_terms,
        model,
        variant,
        depth=depth,
        kv_type=settings.kv_type,
        n_sequences=n_sequences,
    )
    cards = layer_bytes.weights_of_cards(model, variant, settings.placement, device)
    by_card = [(part, terms(hardware=hardware(card, variant, settings))) for card, part in cards]
    seconds = _mean_of_cards(by_card)
    waits_s = n_sequences * layer_bytes.token_s(model, variant, settings)
    waits_s += (device.n_gpus - 1) * CROSSING_S
    basis, spread = _basis("decode", machine, _kind(model), depth=depth)
    if device.bandwidth_gbps.basis == "assumed":
        basis = f"assumed {machine.bandwidth_gbps:.0f} GB/s"
        spread = 0.5
    rows_s = 0.0
    if n_sequences > 1:
        _, batched_spread = _basis(
            "batched", machine, _kind(model), depth=depth, evidence=ranges.UNSEEN_KIND
        )
        spread = max(spread, batched_spread)
        row_s = machine.timed_row_s(model, variant, n_sequences)
        if row_s is None:
            row_s = prefill_cost.prefill_terms(model, variant, machine).seconds["matmul"]
        rows_s = n_sequences * row_s
    share = layer_bytes.shares(model, variant, settings.placement)
    if not share.is_complete and device.kind == "discrete":
        host = _host(device)
        host_bandwidth = device.host_bandwidth_gbps
        on_host = terms(hardware=host).seconds
        for cause, card_s in seconds.items():
            card_share: float = getattr(share, layer_bytes.SHARED_AS[cause])
            seconds[cause] = card_share * card_s + (1 - card_share) * on_host[cause]
        copy_s = n_sequences * model.hidden_size * 4 / _PCIE_BYTES_S
        waits_s += share.crossings * (CROSSING_S + copy_s)
        spread = max(spread, _SPLIT_SPREAD)
        rows_s = 0.0
        known = host_bandwidth.basis if host_bandwidth else "assumed"
        basis += f"; system memory {host.bandwidth_gbps:.0f} GB/s ({known})"
    read_s = seconds["weights"] + seconds["routed"] + seconds["state"]
    fixed_s = sum(seconds.values()) - read_s - seconds["kv"] + waits_s
    fixed_s = max(fixed_s, rows_s - read_s - seconds["kv"])
    step = DecodeStep(read_s, fixed_s, seconds["kv"], spread, basis, seconds["routed"])
    if n_sequences == 1:
        return step
    alone = decode_step(device, model, variant, settings, depth=depth)
    return _no_slower_than_in_turn(step, alone, n_sequences)


def _mean_of_cards(costs: Sequence[tuple[float, decode_cost.DecodeCost]]) -> dict[str, float]:
    """Return the seconds of a step by cause, given each card's part of the weights and its cost of
    all of them."""
    _, first = costs[0]
    seconds = dict(first.seconds)
    if len(costs) > 1:
        for cause in seconds:
            seconds[cause] = sum(part * cost.seconds[cause] for part, cost in costs)
    return seconds


def _no_slower_than_in_turn(step: DecodeStep, alone: DecodeStep, n_sequences: int) -> DecodeStep:
    """Return the `step` of several sequences, at most as long as their steps one after another.
    `alone` is a step of one sequence."""
    in_turn_s = n_sequences * alone.total_s
    if step.total_s <= in_turn_s:
        return step
    share = in_turn_s / step.total_s
    return replace(
        step,
        weights_s=share * step.weights_s,
        fixed_s=share * step.fixed_s,
        attention_s=share * step.attention_s,
        routed_s=share * step.routed_s,
    )


def hardware(device: Device, variant: Variant, settings: RunSettings) -> decode_cost.Hardware:
    """Return `device` as the cost models see it when it runs `variant` with these settings."""
    if settings.placement.layout == "stored":
        return decode_cost.as_stored(decode_cost.hardware_of(device, ""))
    return decode_cost.hardware_of(device, backend_of(variant).name)


@lru_cache(1024)
def _host(device: Device) -> decode_cost.Hardware:
    """Return the CPU next to a discrete card, which computes the layers in system memory."""
    bandwidth = device.host_bandwidth_gbps
    if bandwidth is None:
        gbps = decode_cost.ASSUMED_BANDWIDTH_GBPS
    elif bandwidth.basis == "measured":
        gbps = bandwidth.value
    else:
        gbps = bandwidth.value * NOMINAL_SHARE
    return decode_cost.Hardware(("cpu",), gbps, _HOST_TFLOPS, device.n_cpu_cores)


def _is_same(run: Measured, model: Model, variant: Variant) -> bool:
    return run.model.id == model.id and run.variant.quant == variant.quant


def _adjusted(
    device: Device, model: Model, variant: Variant, step: DecodeStep, runs_here: Sequence[Measured]
) -> tuple[float, float, str]:
    """Return (seconds, spread, source) of `step`, adjusted by this machine's own runs.

    Each run shows the cost of weights, layers and attention here (`learned`). The part of a
    variant's own figures that this does not explain applies to that variant alone.
    """
    observations: list[calibration.Observation] = []
    own_runs: list[calibration.Observation] = []
    for run in runs_here:
        is_same = _is_same(run, model, variant)
        noise = _OWN_NOISE if is_same else _OTHER_NOISE
        for depth, rate in run.decoded:
            parts = decode_step(device, run.model, run.variant, run.run, depth=depth).parts
            observation = calibration.Observation(parts, 1 / rate, noise)
            observations.append(observation)
            if is_same:
                own_runs.append(observation)
    prior = calibration.ACCELERATOR
    if efficiency.engine_of(device, backend_of(variant).name) == "cpu":
        prior = calibration.CPU
    learnt = calibration.learn(observations, prior)
    seconds = learnt.seconds(step.parts)
    uncertainty = learnt.uncertainty(step.parts)
    if own_runs:
        residuals = [math.log(o.seconds / learnt.seconds(o.parts)) for o in own_runs]
        seconds *= math.exp(sum(residuals) / len(residuals))
        return seconds, math.hypot(0.05, uncertainty), "this model"
    return seconds, math.hypot(_MODEL_SPREAD, uncertainty), _model_names(runs_here)


def _same_file(measured: Sequence[Measured], model: Model, variant: Variant) -> list[Measured]:
    """Return the figures of the same file: the model's quant, in the same size."""
    return [
        run
        for run in measured
        if _is_same(run, model, variant)
        and abs(run.variant.file_bytes / variant.file_bytes - 1) < _SAME_SIZE
    ]


def _with_others(
    predicted: Range,
    spread: float,
    others: Sequence[Measured],
    of_run: Callable[[Measured], Sequence[tuple[float, float]]],
) -> Range:
    """Return `predicted`, joined with the figures of `others`. `of_run` returns the (measured,
    predicted) tokens/s of a run."""
    logs: dict[str, list[float]] = {}
    rates: list[float] = []
    for run in others:
        rows = of_run(run)
        if by_others.is_plausible(rows):
            logs.setdefault(run.source, []).extend(math.log(own / rate) for rate, own in rows)
            rates.append(rows[-1][0])
    if not logs:
        return predicted
    from statistics import median

    shift, spread = by_others.joined(logs, spread)
    sources = "1 source" if len(logs) == 1 else f"{len(logs)} sources"
    basis = f"measured by others: {median(rates):.3g} ({sources})"
    return _range(predicted.value * math.exp(-shift), spread, basis)


def _model_names(measured: Sequence[Measured]) -> str:
    """Return the first three of the measured models."""
    return ", ".join(sorted({run.model.id for run in measured})[:3])


# --- prefill --------------------------------------------------------------------------------------


def prefill(
    device: Device,
    model: Model,
    variant: Variant,
    settings: RunSettings = USUAL,
    *,
    prompt_tokens: int = 2048,
    depth: int = 0,
    measured: Sequence[Measured] = (),
) -> Range:
    """Return the predicted prompt speed, tokens/s, over `prompt_tokens` that follow `depth` cached
    tokens."""
    device = layer_bytes.with_used_cards(device, settings.placement)
    machine = hardware(device, variant, settings)
    seconds = _prompt_seconds(device, model, variant, settings, tokens=prompt_tokens, at=depth)
    basis, spread = _basis("prefill", machine, _kind(model), depth=depth + prompt_tokens // 2)
    _, compute_basis = efficiency.nominal_tflops(device)
    if compute_basis == "assumed":
        basis = f"{basis}; compute assumed"
        spread = max(spread, 0.5)
    elif compute_basis == "measured":
        basis = "formula on what this build's kernels were measured to multiply here"
    if (
        device.kind == "discrete"
        and not layer_bytes.shares(model, variant, settings.placement).is_complete
    ):
        spread = max(spread, 0.4)
    backend = backend_of(variant).name
    runs = [
        m for m in measured if m.backend == backend and m.prefill_tok_s > 0 and m.prompt_tokens > 0
    ]

    def at_its_prompt(m: Measured) -> float:
        """The predicted seconds of a token of its prompt."""
        ran_with = replace(settings, placement=m.placement, n_batch=m.n_batch)
        return _prompt_seconds(device, m.model, m.variant, ran_with, tokens=m.prompt_tokens, at=0)

    runs_here = [run for run in runs if not run.source]
    if not runs_here:
        predicted = _range(1 / seconds, spread, basis)
        found = _with_others(
            predicted,
            spread,
            _same_file(runs, model, variant),
            lambda run: [(run.prefill_tok_s, 1 / at_its_prompt(run))],
        )
        return efficiency.under_lasting_load(device, found)
    same_model = [run for run in runs_here if _is_same(run, model, variant)]
    logs = [math.log(1 / run.prefill_tok_s / at_its_prompt(run)) for run in same_model or runs_here]
    seconds *= math.exp(sum(logs) / len(logs))
    if same_model:
        return _range(1 / seconds, 0.08, "measured here: this model")
    return _range(1 / seconds, 0.2, f"measured here: {_model_names(runs_here)}")


def _prompt_seconds(
    device: Device, model: Model, variant: Variant, settings: RunSettings, *, tokens: int, at: int
) -> float:
    """Return the predicted seconds of one prompt token, in a prompt of `tokens` after `at` tokens
    of context."""

    def seconds_on(machine: decode_cost.Hardware) -> float:
        return prefill_cost.prefill_terms(
            model, variant, machine, prompt_tokens=tokens, depth=at, n_batch=settings.n_batch
        ).total_s

    device = layer_bytes.with_used_cards(device, settings.placement)
    weight_shares = layer_bytes.weights_of_cards(model, variant, settings.placement, device)
    seconds = sum(
        part * seconds_on(hardware(card, variant, settings)) for card, part in weight_shares
    )
    seconds *= _pipelined_share(device, settings, [part for _, part in weight_shares], tokens)
    seconds += layer_bytes.token_s(model, variant, settings)
    share = layer_bytes.shares(model, variant, settings.placement)
    if share.is_complete or device.kind != "discrete":
        return seconds
    read = streamed(model, variant)
    chosen = read.step_bytes(model, settings.n_batch)
    host_bytes = read.dense_bytes * (1 - share.dense)
    host_bytes += (chosen - read.dense_bytes) * (1 - share.experts)
    # They are copied over PCIe once per micro-batch, if that is faster than the CPU.
    copy_s = host_bytes / _PCIE_BYTES_S / max(1, min(settings.n_batch, tokens))
    return seconds + min(seconds_on(_host(device)) * host_bytes / max(1, chosen), copy_s)


# Share of the ideal gain of several cards that work on micro-batches at the same time. Two RTX 3060
# read a prompt of a 27B in one micro-batch at 556 tokens/s, in four at 810 and in eight at 870
# (llama-bench b10453).
_PIPELINE_SHARE = 0.8


def _pipelined_share(
    device: Device, settings: RunSettings, card_shares: Sequence[float], tokens: int
) -> float:
    """Return the time of a prompt on several cards, as a share of the time if only one card worked
    at a time.

    With all layers on cards, llama.cpp runs one micro-batch on each card at the same time. The card
    with most weights determines the time of every micro-batch but the first.
    """
    n_cards = device.n_gpus
    if n_cards < 2 or settings.placement.is_split:
        return 1.0
    largest = max(card_shares) if len(card_shares) > 1 else 1 / n_cards
    n_steps = max(1.0, tokens / settings.n_batch)
    gained = (1 - largest) * (1 - 1 / n_steps)
    return 1 - _PIPELINE_SHARE * gained


# One change between card and host within a step. It starts the copy of a few kilobytes, waits for
# it, and launches the next part.
CROSSING_S = 15e-6
# Share of its memory's nominal rate that a desktop CPU reads: the six published runs that are split
# between a card and system memory are right on average (tests/planner/test_placement_search.py).
NOMINAL_SHARE = 0.7
# Uncertainty (ln) of two memories and the link between them together: the spread of those six runs.
_SPLIT_SPREAD = 0.3
_PCIE_BYTES_S = 20e9  # PCIe 4.0 ×16 in practice
_HOST_TFLOPS = 1.0  # of the CPU next to a card, order of magnitude


def ttft(
    prefill_tok_s: Range, decode_tok_s: Range, prompt_tokens: int, *, cached_tokens: int = 0
) -> Range:
    """Return the seconds until the first token of an answer to `prompt_tokens`, with
    `cached_tokens` of them already in the cache."""
    n_new = max(1, prompt_tokens - cached_tokens)
    value = n_new / prefill_tok_s.value + 1 / decode_tok_s.value
    soonest_s = n_new / prefill_tok_s.high + 1 / decode_tok_s.high
    latest_s = n_new / prefill_tok_s.low + 1 / decode_tok_s.low
    return Range(value, soonest_s, latest_s, prefill_tok_s.basis)


def load_time(variant: Variant) -> Range:
    """Return the seconds to read the files from disk once (a second start finds them in the page
    cache)."""
    value = variant.file_bytes / ASSUMED_DISK_BYTES_S
    basis = f"assumed disk {ASSUMED_DISK_BYTES_S / 1e9:.1f} GB/s"
    return Range(value, value * 0.8, value * 3.0, basis)
