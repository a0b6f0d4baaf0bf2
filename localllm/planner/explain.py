"""Print the arithmetic of a Plan: the output of `recommend --explain`."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import partial

from localllm.device.types import Device
from localllm.formatting import gb, mb
from localllm.memory.verdict import TIGHT_MEANS
from localllm.planner import (
    decode_cost,
    efficiency,
    kernels,
    kv_sizes,
    layer_bytes,
    prefill_cost,
    quality,
    speed,
)
from localllm.planner.bytes_per_token import facts, streamed
from localllm.planner.explanations import host_parts
from localllm.planner.types import Plan, Range, RunSettings, backend_of
from localllm_catalog.types import ESTIMATED, Layer, Variant


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"


def _range_text(value: Range, unit: str) -> str:
    if value.value >= 100:
        digits = 0
    elif value.value >= 1:
        digits = 1
    else:
        digits = 2
    low = f"{value.low:.{digits}f}"
    high = f"{value.high:.{digits}f}"
    return f"{value.value:.{digits}f} {unit} ({low} to {high}; {value.basis})"


def _layer_text(layer: Layer, settings: RunSettings) -> str:
    cells = layer.mixer.cells(kv_sizes.layout(settings))
    return layer.mixer.describe(cells, settings.n_sequences)


def _memory_lines(plan: Plan, device: Device) -> Iterator[str]:
    account = plan.memory
    settings = plan.settings
    yield "memory"
    yield _memory_row(
        "weights", account.weights_bytes, f"{plan.variant.quant}, {_exactness_text(plan.variant)}"
    )
    cells = f"{settings.kv_type}, {settings.n_ctx:,} cells shared by {settings.slots} sequences"
    yield _memory_row("KV cache", account.kv_bytes, cells)
    layers = Counter(_layer_text(layer, settings) for layer in plan.model.layers)
    for words, count in layers.items():
        yield f"    {count} layers: {words}"
    if account.recurrent_bytes:
        yield _memory_row("state", account.recurrent_bytes, "float32, one per sequence")
    if backend_of(plan.variant).buffers == "grown":
        buffers_text = "activations and logits of a step, and buffers kept for reuse"
    else:
        buffers_text = "flash attention on"
    yield _memory_row(
        "compute", account.compute_bytes, f"micro-batch {settings.n_batch:,}, {buffers_text}"
    )
    yield from _optional_memory_rows(plan, device)
    usable = gb(account.limit_bytes, 3)
    yield _memory_row("total", account.total_bytes, f"of {usable} usable: {plan.fits}")
    if plan.fits == "tight":
        yield f"  {'':12} {'':>14}   tight: {TIGHT_MEANS}"
    if account.host_bytes:
        yield _memory_row("host memory", account.host_bytes, "also, in system memory")
    if account.disk_bytes:
        row_text = f"{layer_bytes.ROW_S * 1e6:.0f} µs each (an SSD, assumed)"
        tables_text = f"tables: {plan.model.lookup_rows} rows per token, {row_text}"
        yield _memory_row("on disk", account.disk_bytes, tables_text)
    if settings.placement.is_split:
        yield f"  split        {host_parts(plan)} from system memory"
    yield from _card_lines(plan, device)
    if plan.kv_bytes_per_1k:
        yield f"  each further 1,024 tokens of context cost {mb(plan.kv_bytes_per_1k)}"


def _exactness_text(variant: Variant) -> str:
    if variant.exact:
        return "exact"
    if variant.is_estimate:
        return ESTIMATED
    return "rounded in their listing"


def _optional_memory_rows(plan: Plan, device: Device) -> Iterator[str]:
    """Yield the runtime, the drafter and the projector, each if it takes memory."""
    account = plan.memory
    if account.overhead_bytes:
        runtime = f"{device.accelerator} context and prefix cache"
        yield _memory_row("runtime", account.overhead_bytes, runtime)
    if account.draft_bytes:
        drafter = plan.settings.drafter
        name = drafter.name
        if drafter.companion is not None:
            name = drafter.companion.kind
        if plan.drafting is not None:
            name += f", one stream {_range_text(plan.drafting, '× as fast')}"
        yield _memory_row("draft", account.draft_bytes, name)
    if account.projector_bytes:
        note = "includes the buffers for a large image or 30 s of sound"
        yield _memory_row("projector", account.projector_bytes, note)


def _memory_row(name: str, n_bytes: int, note: str) -> str:
    return f"  {name:<12} {gb(n_bytes, 3):>14}   {note}"


def _time_row(name: str, value: str, note: str = "") -> str:
    return f"  {name:<12} {value:>13}   {note}"


def _card_lines(plan: Plan, device: Device) -> Iterator[str]:
    """Yield the memory on each card; empty if all of it is on one."""
    placement = plan.settings.placement
    account = plan.memory
    cards_bytes = account.cards_bytes
    if not cards_bytes and placement.cards:
        cards_bytes = (account.total_bytes,)
    limits = account.cards_limit_bytes or (account.limit_bytes,)
    names = {card.number: card.name for card in device.cards}
    card_numbers = placement.cards or range(len(cards_bytes))
    for i, (number, n_bytes, limit) in enumerate(
        zip(card_numbers, cards_bytes, limits, strict=False)
    ):
        line = f"  GPU {number:<8} {gb(n_bytes, 3):>14}   of {gb(limit, 3)} usable"
        if number in names:
            line += f" of {names[number]}"
        if i < len(placement.tensor_split):
            line += f", {placement.tensor_split[i]:g} layers"
        yield line
    unused_cards = [
        name for number, name in names.items() if placement.cards and number not in placement.cards
    ]
    if unused_cards:
        yield f"  not used     {', '.join(unused_cards)}, because it would not speed up answers"


def _split_lines(plan: Plan, device: Device) -> list[str]:
    """Return the cost of a token of a split plan, by memory; empty for a plan that is not split."""
    share = layer_bytes.shares(plan.model, plan.variant, plan.settings.placement)
    if share.is_complete or device.kind != "discrete":
        return []
    streamed_bytes = streamed(plan.model, plan.variant)
    host_bytes = streamed_bytes.dense_bytes * (1 - share.dense) + streamed_bytes.routed_bytes * (
        1 - share.experts
    )
    expert_bytes = layer_bytes.parts(plan.model, plan.variant).expert_bytes * (1 - share.experts)
    crossing_text = (
        f"{speed.CROSSING_S * 1e6:.0f} µs (assumed), for each change of memory within a step"
    )
    return [
        f"  in system memory {host_bytes / 1e9:>6.3f} GB of a token's bytes, "
        f"read at {_host_rate(device)}",
        f"  {expert_bytes / 1e9:.1f} GB of experts are there; "
        f"{share.layers:.0%} of the layers are on the GPU",
        f"  crossings    {share.crossings:>13}   × {crossing_text}",
    ]


def _host_rate(device: Device) -> str:
    host = device.host_bandwidth_gbps
    if host is None:
        return "an unknown rate"
    rate = f"{host.value:,.0f} GB/s ({host.basis}: {host.source})"
    if host.basis == "measured":
        return rate
    return f"{rate}, of which {speed.NOMINAL_SHARE:.0%} are assumed usable"


def _decode_lines(plan: Plan, device: Device) -> list[str]:
    hardware = speed.hardware(device, plan.variant, plan.settings)
    at_depth = partial(
        decode_cost.decode_terms,
        plan.model,
        plan.variant,
        hardware,
        kv_type=plan.settings.kv_type,
    )
    terms = at_depth(depth=0)
    lines = _token_lines(plan, device, hardware, terms)
    at_empty = plan.decode_tok_s
    at_full = plan.decode_tok_s_full
    split_lines = _split_lines(plan, device)
    if split_lines:
        return [
            *lines,
            "decode, split (the lines above assume one card with the complete model)",
            *split_lines,
            _time_row("empty", _ms(1 / at_empty.value), _range_text(at_empty, "tok/s")),
            _time_row("full", _ms(1 / at_full.value), _range_text(at_full, "tok/s")),
        ]
    full = at_depth(depth=plan.settings.n_ctx)
    kv_read = f"{full.kv_read_bytes / 1e9:.2f} GB with the context full"
    if hardware.engine == "cpu" and hardware.n_cpu_cores:
        kv_read += ", and attention arithmetic"
    return [
        *lines,
        _time_row("empty", _ms(terms.total_s), _range_text(at_empty, "tok/s")),
        _time_row("KV read", _ms(full.seconds["kv"]), kv_read),
        _time_row("full", _ms(full.total_s), _range_text(at_full, "tok/s")),
    ]


def _token_lines(
    plan: Plan, device: Device, hardware: decode_cost.Hardware, terms: decode_cost.DecodeCost
) -> list[str]:
    """Return the causes of a decode step with an empty context."""
    read = terms.streamed
    coefficients = terms.coefficients
    seconds = terms.seconds
    experts = plan.model.experts
    # A mixture takes longer in all of these by this measured factor.
    moe_factor = coefficients["moe"] if experts is not None else 1.0
    wait_us = (
        1e6 * coefficients["clock"] ** decode_cost.clock_power(hardware.clock_ghz) * moe_factor
    )

    def launches(n: int, coefficient: str) -> str:
        return f"{n} × {coefficients[coefficient] * wait_us:.0f} µs"

    bandwidth = device.bandwidth_gbps.value
    memory_text = f"{bandwidth:,.0f} GB/s ({device.bandwidth_gbps.basis})"
    bound_tok_s = bandwidth * 1e9 / read.total_bytes
    eta = decode_cost.weight_share(coefficients, hardware, plan.model, plan.variant) / moe_factor
    dense_text = f"{read.dense_bytes / 1e9:.3f} GB at {eta:.0%} of the bandwidth"
    lines = [
        "decode, one token",
        f"  reads        {read.total_bytes / 1e9:>10.3f} GB   weights; memory "
        f"delivers {memory_text}",
        f"  bound        {bound_tok_s:>10.1f} tok/s   bandwidth ÷ bytes",
        _time_row("always", _ms(seconds["weights"]), dense_text),
    ]
    if read.routed_bytes and experts is not None:
        routed_text = f"{read.routed_bytes / 1e9:.3f} GB: {experts.n_active} of {experts.n_experts}"
        lines.append(_time_row("experts", _ms(seconds["routed"]), routed_text))
    unpacked_s = seconds["unpacked"] + seconds["routed_unpacked"]
    if unpacked_s:
        billions = (read.dense_params + read.routed_params) / 1e9
        unpacked_text = f"{billions:.3g} billion weights, unpacked for the products"
        lines.append(_time_row("unpacking", _ms(unpacked_s), unpacked_text))
    counts = facts(plan.model)
    layers_text = f"{launches(counts.n_layers, 'layer_s')} of launches"
    lines.append(_time_row("layers", _ms(seconds["layers"]), layers_text))
    if counts.n_expert_layers:
        routing_text = launches(counts.n_expert_layers, "expert_layer_s")
        lines.append(_time_row("routing", _ms(seconds["experts"]), routing_text))
    if counts.n_recurrent_layers:
        recurrent_text = launches(counts.n_recurrent_layers, "recurrent_layer_s")
        states_text = f"{decode_cost.state_traffic_bytes(plan.model) / 1e6:.0f} MB of states"
        recurrent_s = seconds["recurrent"] + seconds["state"]
        lines.append(
            _time_row("recurrent", _ms(recurrent_s), f"{recurrent_text}, and {states_text}")
        )
    return lines


def _layout_line(plan: Plan, device: Device) -> str:
    """Return how much faster prefill is with the weights as stored; "" if they are repacked."""
    if plan.settings.placement.layout != "stored":
        return ""
    flops_s = partial(kernels.flops_s, device.matrix_rates, plan.model, plan.variant)
    stored = flops_s(stored=True)
    usual = flops_s(stored=False)
    if stored is None or usual is None:
        return ""
    return _time_row(
        "as stored",
        f"{stored[0] / usual[0]:.2f} ×",
        "as fast as with weights repacked for the CPU (measured)",
    )


def _prompt_lines(plan: Plan, device: Device) -> Iterator[str]:
    terms = prefill_cost.prefill_terms(
        plan.model,
        plan.variant,
        speed.hardware(device, plan.variant, plan.settings),
        n_batch=plan.settings.n_batch,
    )
    seconds = terms.seconds
    flops = 2 * prefill_cost.matrix_params(plan.model, plan.variant)
    activation_bytes = prefill_cost.activation_bytes(plan.model)
    yield "prompt, per token of 2,048"
    yield _time_row(
        "matrices",
        _microseconds(seconds["matmul"]),
        f"{flops / 1e9:.1f} GFLOP; {_compute_rate_text(plan, device)}",
    )
    attention = f"{terms.attention_flops / 1e9:.2f} GFLOP on average"
    yield _time_row("attention", _microseconds(seconds["attention"]), attention)
    if seconds["scan"]:
        yield _time_row("recurrent", _microseconds(seconds["scan"]), "states updated")
    activations = f"{activation_bytes / 1e6:.1f} MB between the matrices"
    yield _time_row("activations", _microseconds(seconds["activations"]), activations)
    weights = f"read once per {min(plan.settings.n_batch, 2048):,} tokens"
    yield _time_row("weights", _microseconds(seconds["weights"]), weights)
    yield _time_row("launches", _microseconds(seconds["layers"])).rstrip()
    if seconds["mask"]:
        yield _time_row("mask", _microseconds(seconds["mask"]), "written by the CPU")
    yield _host_part_line(plan, device, terms.total_s)
    yield _layout_line(plan, device)
    yield f"  prefill      {_range_text(plan.prefill_tok_s, 'tok/s')}"
    yield f"  first token  {_range_text(plan.ttft_s, 's')}"
    if plan.ttft_cached_s is not None:
        yield f"   with prefix {_range_text(plan.ttft_cached_s, 's')}"
    yield f"  loading      {_range_text(plan.load_s, 's')}"


def _compute_rate_text(plan: Plan, device: Device) -> str:
    """Return the compute rate of prefill: "nominal 165.0 TFLOP/s (published)"."""
    tflops, basis = efficiency.nominal_tflops(device, plan.backend)
    hardware = speed.hardware(device, plan.variant, plan.settings)
    measured = hardware.timed_flops_s(plan.model, plan.variant)
    if measured is not None:
        tflops = measured[0] / 1e12
    digits = 1 if tflops >= 1 else 3
    rate = f"{tflops:.{digits}f} TFLOP/s ({basis})"
    if basis == "measured":
        return rate
    return f"nominal {rate}"


def _host_part_line(plan: Plan, device: Device, on_card_s: float) -> str:
    """Return the time that a part in system memory adds to a prompt token; "" if it adds no
    time."""
    share = layer_bytes.shares(plan.model, plan.variant, plan.settings.placement)
    longer_s = 1 / plan.prefill_tok_s.value - on_card_s
    if share.is_complete or device.kind != "discrete" or longer_s <= 0:
        return ""
    return _time_row(
        "divided",
        _microseconds(longer_s),
        "more: weights in system memory are copied over the bus, or multiplied on the CPU",
    )


def explain(plan: Plan, device: Device, *, columns: int = 80) -> list[str]:
    """Return all numbers of `plan` with their derivation, as lines of text of at most `columns`."""
    lines = [
        f"{plan.model.name} {plan.variant.quant} on {device.name}",
        *_memory_lines(plan, device),
        *_decode_lines(plan, device),
        *_prompt_lines(plan, device),
        *_quality_lines(plan),
    ]
    if plan.reasons:
        lines.append("further")
        lines += [f"  {reason}" for reason in plan.reasons]
    return [part for line in lines if line for part in _folded(line, columns)]


def _quality_lines(plan: Plan) -> list[str]:
    format_cost = quality.format_cost(plan.model, plan.variant)
    loss_of = quality.format_basis(plan.variant) or plan.variant.quant
    kv_cost = quality.kv_cost(plan.settings.kv_type)
    points = plan.quality + format_cost + kv_cost
    basis = plan.quality_basis
    if not plan.is_rated:
        basis = f"no public score; estimated by {basis}"
    return [
        "quality",
        f"  rating       {points:>10.1f} ± {plan.quality_spread:.1f}   {basis}",
        f"  format       {0.0 - format_cost:>10.1f}   {loss_of}",
        f"  KV type      {0.0 - kv_cost:>10.1f}   {plan.settings.kv_type}: {plan.kv_why}",
        f"  rank score   {plan.score:>10.1f}",
    ]


def _folded(line: str, columns: int) -> list[str]:
    """Wrap `line` to the columns. Further lines start under its last column (after "GB   ", "tok/s
    " …)."""
    if len(line) <= columns:
        return [line]
    indent = 4
    label = re.match(r" *\S.*?\S {3,}(?=\S)(?:.{0,20}?\S {3}(?=\S))?", line)
    if label is not None and label.end() <= columns // 2:
        indent = label.end()
    return textwrap.wrap(
        line, columns, subsequent_indent=" " * indent, drop_whitespace=True, break_on_hyphens=False
    )
