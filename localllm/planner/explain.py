"""The arithmetic of a Plan, line by line: what `recommend --explain` prints."""

from __future__ import annotations

import re
import textwrap
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
from localllm.planner.types import Plan, Range, backend_of
from localllm_catalog.types import ESTIMATED, Model


def _drafter(plan: Plan) -> str:
    companion = plan.settings.drafter.companion
    return companion.kind if companion is not None else plan.settings.drafter.name


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _span(value: Range, unit: str) -> str:
    digits = 0 if value.value >= 100 else 1 if value.value >= 1 else 2
    return (
        f"{value.value:.{digits}f} {unit} ({value.low:.{digits}f} to {value.high:.{digits}f}; "
        f"{value.basis})"
    )


def _layer_lines(model: Model, plan: Plan) -> list[str]:
    groups: dict[str, list[int]] = {}
    for layer in model.layers:
        cells = kv_sizes.kv_cells(layer, plan.settings)
        if layer.kind == "mla":
            what = f"latent, {layer.mla_rank} + {layer.mla_rope_dim} wide, {cells:,} cells"
        elif layer.kind == "recurrent":
            what = (
                f"recurrent, {layer.state_elements:,} floats of state × "
                f"{plan.settings.n_sequences} sequences"
            )
        elif layer.kind == "none":
            what = "no memory"
        elif layer.shares_kv:
            what = "share another layer's KV"
        else:
            kind = f"sliding {layer.window:,}" if layer.kind == "sliding" else "full"
            what = (
                f"{kind}, {layer.n_kv_heads} heads × ({layer.head_dim_k} + "
                f"{layer.head_dim_v}), "
                f"{cells:,} cells"
            )
        groups.setdefault(what, []).append(1)
    return [f"    {len(members)} layers: {what}" for what, members in groups.items()]


def _memory_lines(plan: Plan, device: Device) -> list[str]:
    need, settings, variant = plan.memory, plan.settings, plan.variant
    exact = (
        "exact"
        if variant.exact
        else ESTIMATED
        if variant.is_estimate
        else ("rounded by their listing")
    )
    grown = backend_of(variant).buffers == "grown"
    how = "a step's activations, logits, buffers kept for reuse" if grown else "flash attention on"
    gain = f", one stream {_span(plan.drafting, '× as fast')}" if plan.drafting is not None else ""
    rows = (
        f"{plan.model.lookup_rows} rows a token, {places.ROW_S * 1e6:.0f} µs each (an SSD, assumed)"
    )
    cells = f"{settings.kv_type}, {settings.n_ctx:,} cells shared by {settings.slots} sequences"
    # (name, bytes, what they are): of what takes none nothing is said but of weights, KV and
    # compute.
    parts = (
        ("state", need.recurrent_bytes, "float32, one per sequence"),
        ("runtime", need.overhead_bytes, f"{device.accelerator} context and prefix cache"),
        ("draft", need.draft_bytes, f"{_drafter(plan)}{gain}"),
        ("projector", need.projector_bytes, "reads images, buffers for a large one included"),
        ("host memory", need.host_bytes, "beside it, in system memory"),
        ("on the disk", need.disk_bytes, f"tables: {rows}"),
    )
    said = {name: [_part(name, n_bytes, what)] for name, n_bytes, what in parts if n_bytes}
    tight = [f"  {'':12} {'':>14}   tight: {TIGHT_MEANS}"] if plan.fits == "tight" else []
    further = (
        [f"  each further 1,024 tokens of context cost {mb(plan.kv_bytes_per_1k)}"]
        if plan.kv_bytes_per_1k
        else []
    )
    return [
        "memory",
        _part("weights", need.weights_bytes, f"{variant.quant}, {exact}"),
        _part("KV cache", need.kv_bytes, cells),
        *_layer_lines(plan.model, plan),
        *said.get("state", ()),
        _part("compute", need.compute_bytes, f"micro-batch {settings.n_batch:,}, {how}"),
        *chain.from_iterable(said.get(name, ()) for name in ("runtime", "draft", "projector")),
        _part("total", need.total_bytes, f"of {gb(need.limit_bytes, 3)} usable: {plan.fits}"),
        *tight,
        *chain.from_iterable(said.get(name, ()) for name in ("host memory", "on the disk")),
        *_place_lines(plan, device),
        *further,
    ]


def _part(name: str, n_bytes: int, what: str) -> str:
    return f"  {name:<12} {gb(n_bytes, 3):>14}   {what}"


def _place_lines(plan: Plan, device: Device) -> list[str]:
    """Which layers and experts lie where, and what every card holds; nothing where all of it is in
    one place."""
    placed = plan.settings.placement
    return [*(_layers_on_gpu(plan) if placed.is_split else ()), *_card_lines(plan, device)]


def _layers_on_gpu(plan: Plan) -> list[str]:
    placed, n = plan.settings.placement, len(plan.model.layers)
    first, kept = placed.first_gpu_layer(n), placed.host_expert_layers(n)
    on_device = f"{n - first} of {n} layers and the output"
    if first >= n:
        on_device = "the output" if first == n else "none"
    lines = [
        f"  on the GPU   {on_device}{', their KV in system memory' if placed.kv_on_host else ''}"
    ]
    if kept > first and plan.model.experts is not None:
        lines.append(
            f"  of these     the routed experts of the first {kept} layers are in system memory"
        )
    return lines


def _card_lines(plan: Plan, device: Device) -> list[str]:
    placed, need = plan.settings.placement, plan.memory
    lines = []
    held = need.cards_bytes or ((need.total_bytes,) if placed.cards else ())
    limits = need.cards_limit_bytes or (need.limit_bytes,)
    numbers = placed.cards or tuple(range(len(held)))
    names = {card.number: card.name for card in device.cards}
    for i, (number, n_bytes, limit) in enumerate(zip(numbers, held, limits, strict=False)):
        share = f", {placed.tensor_split[i]:g} layers" if i < len(placed.tensor_split) else ""
        name = f" of {names[number]}" if number in names else ""
        lines.append(
            f"  GPU {number:<8} {gb(n_bytes, 3):>14}   of {gb(limit, 3)} usable{name}{share}"
        )
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
    rate = f"{host.value:,.0f} GB/s ({host.basis}: {host.source})" if host else "an unknown rate"
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
    bandwidth, basis = decode_cost.bandwidth_of(device)
    hardware = speed.hardware(device, plan.variant, plan.settings)
    terms, full = (
        decode_cost.decode_terms(
            plan.model, plan.variant, hardware, depth=depth, kv_type=plan.settings.kv_type
        )
        for depth in (0, plan.settings.n_ctx)
    )
    parts, c = terms.streamed, terms.coefficients
    eta = decode_cost.weight_share(c, hardware, plan.model, plan.variant)
    known = facts(plan.model)
    layers, experts, recurrent = known.n_layers, known.n_expert_layers, known.n_recurrent_layers
    lines = [
        "decode, one token",
        f"  reads        {parts.total_bytes / 1e9:>10.3f} GB   weights; memory delivers "
        f"{bandwidth:,.0f} GB/s ({basis})",
        f"  bound        {bandwidth * 1e9 / parts.total_bytes:>10.1f} tok/s   bandwidth ÷ bytes",
        f"  always       {_ms(terms.seconds['weights']):>13}   {parts.dense_bytes / 1e9:.3f} GB "
        f"at {eta:.0%} of the bandwidth",
    ]
    if parts.routed_bytes and plan.model.experts is not None:
        x = plan.model.experts
        lines.append(
            f"  experts      {_ms(terms.seconds['routed']):>13}   {parts.routed_bytes / 1e9:.3f} "
            f"GB: {x.n_active} of {x.n_experts}"
        )
    unpacked_s, wait_us = (
        terms.seconds["unpacked"] + terms.seconds["routed_unpacked"],
        decode_cost.launch_factor(c, hardware) * 1e6,
    )
    if unpacked_s:
        n_params = parts.dense_params + parts.routed_params
        lines.append(
            f"  unpacking    {_ms(unpacked_s):>13}   {n_params / 1e9:.3g} billion weights, to "
            "what is multiplied"
        )
    lines.append(
        f"  layers       {_ms(terms.seconds['layers']):>13}   {layers} × "
        f"{c['layer_s'] * wait_us:.0f} µs of launches"
    )
    if experts:
        lines.append(
            f"  routing      {_ms(terms.seconds['experts']):>13}   {experts} × "
            f"{c['expert_layer_s'] * wait_us:.0f} µs"
        )
    if recurrent:
        recurrent_s = terms.seconds["recurrent"] + terms.seconds["state"]
        lines.append(
            f"  recurrent    {_ms(recurrent_s):>13}   {recurrent} × "
            f"{c['recurrent_layer_s'] * wait_us:.0f} µs, "
            f"and {decode_cost.state_traffic_bytes(plan.model) / 1e6:.0f} MB of states"
        )
    work = ", and its arithmetic" if hardware.engine == "cpu" and hardware.n_cpu_cores else ""
    if abs(terms.mixture_factor - 1) > 0.005:
        lines.append(
            f"  mixture      {terms.mixture_factor:>12.2f}×   as measured for mixtures of experts"
        )
    split = _split_lines(plan, device)
    if split:
        lines += ["decode, divided (the lines above are of a card that held all of it)", *split]
        lines.append(
            f"  empty        {_ms(1 / plan.decode_tok_s.value):>13}   "
            f"{_span(plan.decode_tok_s, 'tok/s')}"
        )
        lines.append(
            f"  full         {_ms(1 / plan.decode_tok_s_full.value):>13}   "
            f"{_span(plan.decode_tok_s_full, 'tok/s')}"
        )
        return lines
    lines += [
        f"  empty        {_ms(terms.total_s):>13}   {_span(plan.decode_tok_s, 'tok/s')}",
        f"  KV read      {_ms(full.seconds['kv']):>13}   {full.kv_read_bytes / 1e9:.2f} GB with "
        f"the context full{work}",
        f"  full         {_ms(full.total_s):>13}   {_span(plan.decode_tok_s_full, 'tok/s')}",
    ]
    return lines


def _layout_line(plan: Plan, device: Device) -> list[str]:
    if plan.settings.placement.layout != "stored":
        return []
    stored, usual = (
        kernels.flops_s(device.matrix_rates, plan.model, plan.variant, stored=s)
        for s in (True, False)
    )
    if stored is None or usual is None:
        return []
    gain = stored[0] / usual[0]
    return [
        f"  as stored    {gain:>11.2f} ×   as fast as with weights laid out anew for the "
        "processor (measured)"
    ]


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
        "TFLOP/s "
        f"({basis})"
    )
    lines = [
        "prompt, per token of 2,048",
        f"  matrices     {terms.seconds['matmul'] * 1e6:>10.1f} µs   {flops / 1e9:.1f} GFLOP; "
        f"{rate}",
        f"  attention    {terms.seconds['attention'] * 1e6:>10.1f} µs   "
        f"{terms.attention_flops / 1e9:.2f} GFLOP on average",
        *(
            [f"  recurrent    {terms.seconds['scan'] * 1e6:>10.1f} µs   states taken forward"]
            if terms.seconds["scan"]
            else []
        ),
        f"  activations  {terms.seconds['activations'] * 1e6:>10.1f} µs   "
        f"{activation_bytes / 1e6:.1f} MB between the matrices",
        f"  weights      {terms.seconds['weights'] * 1e6:>10.1f} µs   read once per "
        f"{min(plan.settings.n_batch, 2048):,} tokens",
        f"  launches     {terms.seconds['layers'] * 1e6:>10.1f} µs",
        *(
            [f"  mask         {terms.seconds['mask'] * 1e6:>10.1f} µs   written by the processor"]
            if terms.seconds["mask"]
            else []
        ),
        *_beside_line(plan, device, terms.total_s),
        *_layout_line(plan, device),
        f"  prefill      {_span(plan.prefill_tok_s, 'tok/s')}",
        f"  first token  {_span(plan.ttft_s, 's')}",
    ]
    if plan.ttft_cached_s is not None:
        lines.append(f"   with prefix {_span(plan.ttft_cached_s, 's')}")
    lines.append(f"  loading      {_span(plan.load_s, 's')}")
    return lines


def _beside_line(plan: Plan, device: Device, on_card_s: float) -> list[str]:
    """What a token of a prompt takes longer because a part of the plan lies in system memory."""
    share = places.shares(plan.model, plan.variant, plan.settings.placement)
    longer_s = 1 / plan.prefill_tok_s.value - on_card_s
    if share.is_whole or device.kind != "discrete" or longer_s <= 0:
        return []
    return [
        f"  divided      {longer_s * 1e6:>10.1f} µs   more: weights in system memory are copied "
        "over the bus, or multiplied there"
    ]


def explain(plan: Plan, device: Device, *, columns: int = 80) -> list[str]:
    """Every number of `plan` with how it comes about, as lines of text of at most so many
    `columns`."""
    format_cost = quality.format_cost(plan.model, plan.variant)
    kv_cost = quality.kv_cost(plan.settings.kv_type)
    points = plan.quality + format_cost + kv_cost
    basis = (
        plan.quality_basis
        if plan.is_rated
        else (f"no public score: guessed by {plan.quality_basis}")
    )
    lines = [
        f"{plan.model.name} {plan.variant.quant} on {device.name}",
        *_memory_lines(plan, device),
        *_decode_lines(plan, device),
        *_prompt_lines(plan, device),
        "quality",
        f"  rating       {points:>10.1f} ± {plan.quality_spread:.1f}   {basis}",
        f"  format       {0.0 - format_cost:>10.1f}   {plan.variant.quant}",
        f"  KV type      {0.0 - kv_cost:>10.1f}   {plan.settings.kv_type}: {plan.kv_why}",
        f"  rank score   {plan.score:>10.1f}",
    ]
    if plan.reasons:
        lines += ["further", *(f"  {reason}" for reason in plan.reasons)]
    return list(chain.from_iterable(_folded(line, columns) for line in lines))


def _folded(line: str, columns: int) -> list[str]:
    """`line` within the columns: what does not fit goes on under its last column (after "GB   ",
    "tok/s   " …)."""
    if len(line) <= columns:
        return [line]
    head = re.match(r" *\S.*?\S {3,}(?=\S)(?:.{0,20}?\S {3}(?=\S))?", line)
    at = head.end() if head is not None and head.end() <= columns // 2 else 4
    return textwrap.wrap(
        line, columns, subsequent_indent=" " * at, drop_whitespace=True, break_on_hyphens=False
    )
