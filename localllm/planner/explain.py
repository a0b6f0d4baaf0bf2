"""The arithmetic of a Plan, line by line: what `recommend --explain` prints."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from itertools import chain

from localllm.device.types import Device
from localllm.formatting import gb, mb
from localllm.memory.verdict import TIGHT_MEANS
from localllm.planner import (
    decode_cost,
    efficiency,
    kernels,
    kv_sizes,
    places,
    prefill_cost,
    quality,
    speed,
)
from localllm.planner.streams import facts, streamed
from localllm.planner.types import Plan, Range, RunSettings, backend_of
from localllm.planner.why import left_behind
from localllm_catalog.types import ESTIMATED, Layer


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _span(value: Range, unit: str) -> str:
    if value.value >= 100:
        digits = 0
    elif value.value >= 1:
        digits = 1
    else:
        digits = 2
    return (
        f"{value.value:.{digits}f} {unit} ({value.low:.{digits}f} to {value.high:.{digits}f}; "
        f"{value.basis})"
    )


def _layer_words(layer: Layer, settings: RunSettings) -> str:
    cells = kv_sizes.kv_cells(layer, settings)
    if layer.kind == "sliding":
        kind = f"sliding {layer.window:,}"
    else:
        kind = "full"
    states = f"{layer.state_elements:,} floats of state × {settings.n_sequences} sequences"
    wide = f"{layer.n_kv_heads} heads × ({layer.head_dim_k} + {layer.head_dim_v})"
    latent = f"{layer.mla_rank} + {layer.mla_rope_dim} wide"
    words = (
        (layer.kind == "mla", f"latent, {latent}, {cells:,} cells"),
        (layer.kind == "recurrent", f"recurrent, {states}"),
        (layer.kind == "none", "no memory"),
        (layer.shares_kv, "share another layer's KV"),
        (True, f"{kind}, {wide}, {cells:,} cells"),
    )
    return next(what for is_so, what in words if is_so)


def _memory_lines(plan: Plan, device: Device) -> list[str]:
    need = plan.memory
    settings = plan.settings
    variant = plan.variant
    if variant.is_estimate:
        listed = ESTIMATED
    else:
        listed = "rounded by their listing"
    grown = backend_of(variant).buffers == "grown"
    if grown:
        how = "a step's activations, logits, buffers kept for reuse"
    else:
        how = "flash attention on"
    if plan.drafting is not None:
        gain = f", one stream {_span(plan.drafting, '× as fast')}"
    else:
        gain = ""
    companion = settings.drafter.companion
    if companion is not None:
        drafter = companion.kind
    else:
        drafter = settings.drafter.name
    rows = (
        f"{plan.model.lookup_rows} rows a token, {places.ROW_S * 1e6:.0f} µs each (an SSD, assumed)"
    )
    cells = f"{settings.kv_type}, {settings.n_ctx:,} cells shared by {settings.slots} sequences"
    layers = Counter(_layer_words(layer, settings) for layer in plan.model.layers)
    # (name, bytes, what they are): of what takes none nothing is said.
    state = ("state", need.recurrent_bytes, "float32, one per sequence")
    further = (
        ("runtime", need.overhead_bytes, f"{device.accelerator} context and prefix cache"),
        ("draft", need.draft_bytes, f"{drafter}{gain}"),
        ("projector", need.projector_bytes, "reads images, buffers for a large one included"),
    )
    beside = (
        ("host memory", need.host_bytes, "beside it, in system memory"),
        ("on the disk", need.disk_bytes, f"tables: {rows}"),
    )
    return [
        "memory",
        _part(
            "weights",
            need.weights_bytes,
            f"{variant.quant}, {'exact' if variant.exact else listed}",
        ),
        _part("KV cache", need.kv_bytes, cells),
        *(f"    {count} layers: {what}" for what, count in layers.items()),
        *_parts(state),
        _part("compute", need.compute_bytes, f"micro-batch {settings.n_batch:,}, {how}"),
        *_parts(*further),
        _part("total", need.total_bytes, f"of {gb(need.limit_bytes, 3)} usable: {plan.fits}"),
        f"  {'':12} {'':>14}   tight: {TIGHT_MEANS}" if plan.fits == "tight" else "",
        *_parts(*beside),
        f"  divided      {left_behind(plan)} from system memory"
        if settings.placement.is_split
        else "",
        *_card_lines(plan, device),
        f"  each further 1,024 tokens of context cost {mb(plan.kv_bytes_per_1k)}"
        if plan.kv_bytes_per_1k
        else "",
    ]


def _parts(*parts: tuple[str, int, str]) -> list[str]:
    return [_part(*part) for part in parts if part[1]]


def _part(name: str, n_bytes: int, what: str) -> str:
    return f"  {name:<12} {gb(n_bytes, 3):>14}   {what}"


def _row(name: str, value: str, what: str = "") -> str:
    return f"  {name:<12} {value:>13}   {what}"


def _card_lines(plan: Plan, device: Device) -> list[str]:
    """What every card holds; nothing where all of it is in one place."""
    placed = plan.settings.placement
    need = plan.memory
    held = need.cards_bytes or ((need.total_bytes,) if placed.cards else ())
    limits = need.cards_limit_bytes or (need.limit_bytes,)
    names = {card.number: card.name for card in device.cards}
    called = {number: f" of {name}" for number, name in names.items()}
    numbers = placed.cards or range(len(held))
    shares = [f", {n:g} layers" for n in placed.tensor_split] + [""] * len(held)
    lines = [
        f"  GPU {number:<8} {gb(n_bytes, 3):>14}   of {gb(limit, 3)} usable"
        f"{called.get(number, '')}{share}"
        for number, n_bytes, limit, share in zip(numbers, held, limits, shares, strict=False)
    ]
    left = [name for number, name in names.items() if placed.cards and number not in placed.cards]
    if left:
        lines.append(f"  not used     {', '.join(left)}: with it an answer would come no faster")
    return lines


def _split_lines(plan: Plan, device: Device) -> list[str]:
    """What a token costs of a split plan, memory by memory."""
    share = places.shares(plan.model, plan.variant, plan.settings.placement)
    if share.is_whole or device.kind != "discrete":
        return []
    parts = places.parts(plan.model, plan.variant)
    read = streamed(plan.model, plan.variant)
    host = device.host_bandwidth_gbps
    if host:
        rate = f"{host.value:,.0f} GB/s ({host.basis}: {host.source})"
    else:
        rate = "an unknown rate"
    if host and host.basis != "measured":
        rate += f", of which {speed.NOMINAL_SHARE:.0%} are counted on"
    left = read.dense_bytes * (1 - share.dense) + read.routed_bytes * (1 - share.experts)
    return [
        f"  in system memory {left / 1e9:>6.3f} GB of what a token reads; it delivers {rate}",
        f"  {parts.expert_bytes * (1 - share.experts) / 1e9:.1f} GB of experts lie there; on the "
        f"GPU {share.layers:.0%} of the layers",
        f"  crossings    {share.crossings:>13}   × {speed.CROSSING_S * 1e6:.0f} µs, assumed: a "
        "step changes memories",
    ]


def _decode_lines(plan: Plan, device: Device) -> list[str]:
    bandwidth = device.bandwidth_gbps.value
    basis = device.bandwidth_gbps.basis
    hardware = speed.hardware(device, plan.variant, plan.settings)
    terms, full = (
        decode_cost.decode_terms(
            plan.model, plan.variant, hardware, depth=depth, kv_type=plan.settings.kv_type
        )
        for depth in (0, plan.settings.n_ctx)
    )
    read = terms.streamed
    c = terms.coefficients
    s = terms.seconds
    x = plan.model.experts
    # All that a mixture of experts does takes so much longer, as measured.
    mixture = c["moe"] if x is not None else 1.0
    eta = decode_cost.weight_share(c, hardware, plan.model, plan.variant) / mixture
    known = facts(plan.model)
    lag = decode_cost.lag(hardware.clock_ghz)
    wait_us = 1e6 * c["clock"] ** lag * mixture
    unpacked_s = s["unpacked"] + s["routed_unpacked"]
    recurrent_s = s["recurrent"] + s["state"]
    n_params = read.dense_params + read.routed_params
    if hardware.engine == "cpu" and hardware.n_cpu_cores:
        work = ", and its arithmetic"
    else:
        work = ""
    launches = {
        name: f"{n} × {c[coefficient] * wait_us:.0f} µs"
        for name, n, coefficient in (
            ("layers", known.n_layers, "layer_s"),
            ("routing", known.n_expert_layers, "expert_layer_s"),
            ("recurrent", known.n_recurrent_layers, "recurrent_layer_s"),
        )
        if n
    }
    states = f"{decode_cost.state_traffic_bytes(plan.model) / 1e6:.0f} MB of states"
    lines = [
        "decode, one token",
        f"  reads        {read.total_bytes / 1e9:>10.3f} GB   weights; memory delivers "
        f"{bandwidth:,.0f} GB/s ({basis})",
        f"  bound        {bandwidth * 1e9 / read.total_bytes:>10.1f} tok/s   bandwidth ÷ bytes",
        _row(
            "always",
            _ms(s["weights"]),
            f"{read.dense_bytes / 1e9:.3f} GB at {eta:.0%} of the bandwidth",
        ),
        _row(
            "experts",
            _ms(s["routed"]),
            f"{read.routed_bytes / 1e9:.3f} GB: {x.n_active} of {x.n_experts}",
        )
        if read.routed_bytes and x is not None
        else "",
        _row(
            "unpacking",
            _ms(unpacked_s),
            f"{n_params / 1e9:.3g} billion weights, to what is multiplied",
        )
        if unpacked_s
        else "",
        _row("layers", _ms(s["layers"]), f"{launches['layers']} of launches"),
        _row("routing", _ms(s["experts"]), launches["routing"]) if "routing" in launches else "",
        _row("recurrent", _ms(recurrent_s), f"{launches['recurrent']}, and {states}")
        if "recurrent" in launches
        else "",
    ]
    empty = plan.decode_tok_s
    filled = plan.decode_tok_s_full
    empty_s = terms.total_s
    filled_s = full.total_s
    split = _split_lines(plan, device)
    if split:
        lines += ["decode, divided (the lines above are of a card that held all of it)", *split]
        empty_s = 1 / empty.value
        filled_s = 1 / filled.value
    lines.append(_row("empty", _ms(empty_s), _span(empty, "tok/s")))
    if not split:
        what = f"{full.kv_read_bytes / 1e9:.2f} GB with the context full{work}"
        lines.append(_row("KV read", _ms(full.seconds["kv"]), what))
    return [*lines, _row("full", _ms(filled_s), _span(filled, "tok/s"))]


def _layout_line(plan: Plan, device: Device) -> str:
    stored, usual = (
        kernels.flops_s(device.matrix_rates, plan.model, plan.variant, stored=s)
        for s in (True, False)
    )
    if plan.settings.placement.layout != "stored" or stored is None or usual is None:
        return ""
    return _row(
        "as stored",
        f"{stored[0] / usual[0]:.2f} ×",
        "as fast as with weights laid out anew for the processor (measured)",
    )


def _prompt_lines(plan: Plan, device: Device) -> list[str]:
    tflops, basis = efficiency.nominal_tflops(device, plan.backend)
    hardware = speed.hardware(device, plan.variant, plan.settings)
    terms = prefill_cost.prefill_terms(
        plan.model, plan.variant, hardware, n_batch=plan.settings.n_batch
    )
    flops = 2 * prefill_cost.matrix_params(plan.model, plan.variant)
    activation_bytes = prefill_cost.activation_bytes(plan.model)
    measured = hardware.timed_flops_s(plan.model, plan.variant)
    tflops = tflops if measured is None else measured[0] / 1e12
    rate = (
        f"{'' if basis == 'measured' else 'nominal '}{tflops:.{1 if tflops >= 1 else 3}f} "
        f"TFLOP/s ({basis})"
    )
    # (name, cause, what it is): of the last two nothing is said where they take nothing.
    causes = (
        ("matrices", "matmul", f"{flops / 1e9:.1f} GFLOP; {rate}"),
        ("attention", "attention", f"{terms.attention_flops / 1e9:.2f} GFLOP on average"),
        ("recurrent", "scan", "states taken forward"),
        ("activations", "activations", f"{activation_bytes / 1e6:.1f} MB between the matrices"),
        ("weights", "weights", f"read once per {min(plan.settings.n_batch, 2048):,} tokens"),
        ("launches", "layers", ""),
        ("mask", "mask", "written by the processor"),
    )
    cached = plan.ttft_cached_s
    return [
        "prompt, per token of 2,048",
        *(
            _row(name, f"{terms.seconds[cause] * 1e6:.1f} µs", what).rstrip()
            for name, cause, what in causes
            if terms.seconds[cause] or cause not in ("scan", "mask")
        ),
        _beside_line(plan, device, terms.total_s),
        _layout_line(plan, device),
        f"  prefill      {_span(plan.prefill_tok_s, 'tok/s')}",
        f"  first token  {_span(plan.ttft_s, 's')}",
        f"   with prefix {_span(cached, 's')}" if cached is not None else "",
        f"  loading      {_span(plan.load_s, 's')}",
    ]


def _beside_line(plan: Plan, device: Device, on_card_s: float) -> str:
    """What a token of a prompt takes longer because a part of the plan lies in system memory."""
    share = places.shares(plan.model, plan.variant, plan.settings.placement)
    longer_s = 1 / plan.prefill_tok_s.value - on_card_s
    if share.is_whole or device.kind != "discrete" or longer_s <= 0:
        return ""
    return _row(
        "divided",
        f"{longer_s * 1e6:.1f} µs",
        "more: weights in system memory are copied over the bus, or multiplied there",
    )


def explain(plan: Plan, device: Device, *, columns: int = 80) -> list[str]:
    """Every number of `plan` with how it comes about, as lines of text of at most so many
    `columns`."""
    format_cost = quality.format_cost(plan.model, plan.variant)
    kv_cost = quality.kv_cost(plan.settings.kv_type)
    points = plan.quality + format_cost + kv_cost
    guessed = "" if plan.is_rated else "no public score: guessed by "
    lines = [
        f"{plan.model.name} {plan.variant.quant} on {device.name}",
        *_memory_lines(plan, device),
        *_decode_lines(plan, device),
        *_prompt_lines(plan, device),
        "quality",
        f"  rating       {points:>10.1f} ± {plan.quality_spread:.1f}   {guessed}{plan.quality_basis}",
        f"  format       {0.0 - format_cost:>10.1f}   {plan.variant.quant}",
        f"  KV type      {0.0 - kv_cost:>10.1f}   {plan.settings.kv_type}: {plan.kv_why}",
        f"  rank score   {plan.score:>10.1f}",
        "further" if plan.reasons else "",
        *(f"  {reason}" for reason in plan.reasons),
    ]
    return list(chain.from_iterable(_folded(line, columns) for line in lines if line))


def _folded(line: str, columns: int) -> list[str]:
    """`line` within the columns: what does not fit goes on under its last column (after "GB   ",
    "tok/s   " …)."""
    if len(line) <= columns:
        return [line]
    head = re.match(r" *\S.*?\S {3,}(?=\S)(?:.{0,20}?\S {3}(?=\S))?", line)
    if head is not None and head.end() <= columns // 2:
        at = head.end()
    else:
        at = 4
    return textwrap.wrap(
        line, columns, subsequent_indent=" " * at, drop_whitespace=True, break_on_hyphens=False
    )
