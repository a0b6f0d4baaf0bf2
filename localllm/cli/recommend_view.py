"""How `recommend` looks: tables that fit 80 columns, memory bars, JSON. Plain text; nothing here decides anything."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from localllm.planner.why import gb, rate

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.planner.types import Plan, Range, Recommendation
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model

WIDTH = 80
GIB = 1 << 30
_BAR = 10
_BIGGER_SHOWN = 4


def out(lines: Iterable[str]) -> None:
    """Print lines to stdout; signs the terminal's encoding lacks become plain ones."""
    encoding = sys.stdout.encoding or "utf-8"
    plain = str.maketrans({"█": "#", "░": ".", "–": "-", "×": "x", "≥": ">=", "…": "...", "·": ".", "─": "-", "µ": "u"})
    for line in lines:
        try:
            line.encode(encoding)
        except UnicodeEncodeError:
            line = line.translate(plain).encode(encoding, "replace").decode(encoding)
        print(line)


def bar(share: float, width: int = _BAR) -> str:
    """A bar of `width` characters filled to `share` (clamped to 0..1; any use at all shows one block)."""
    filled = min(width, max(1 if share > 0 else 0, round(share * width)))
    return "█" * filled + "░" * (width - filled)


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _speed(value: Range) -> str:
    return f"{rate(value.low)}–{rate(value.high)}"


def seconds(value: float) -> str:
    """0.4 s, 12 s, 3.1 min."""
    if value < 9.95:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.1f} min"


def heading(device: Device, what: str) -> list[str]:
    """Two lines: what is shown, and what the machine offers with how that is known."""
    known = device.bandwidth_gbps
    bandwidth = f"{known.value:,.0f} GB/s ({known.basis})" if known else "bandwidth unknown"
    memory = device.memory
    free = ""
    if memory.available_bytes < memory.limit_bytes:
        free = f", {gb(memory.available_bytes)} free now"
    return [
        _clip(f"{what} on {device.name}{' (simulated)' if device.simulated else ''}", WIDTH),
        _clip(f"{gb(memory.limit_bytes)} usable of {gb(memory.total_bytes)}{free}; {bandwidth}", WIDTH),
    ]


_HEAD = f"    {'model':25} {'quant':10} {'memory':>8} {'of usable':10} {'tok/s':>9} {'1st':>6}"


def _row(number: str, plan: Plan) -> str:
    quant = plan.variant.quant + ("*" if plan.backend == "mlx" else "")
    share = plan.memory.total_bytes / max(1, plan.memory.limit_bytes)
    return (
        f"{number:>3} {_clip(plan.model.name, 25):25} {_clip(quant, 10):10} {gb(plan.memory.total_bytes):>8} "
        f"{bar(share):10} {_speed(plan.decode_tok_s):>9} {seconds(plan.ttft_s.value):>6}"
    ).rstrip()


def table(answer: Recommendation, device: Device, *, everything: bool = False) -> list[str]:
    """The picks with their reasons, then what does not fit; with `everything` every model and its reason."""
    from localllm.planner import needs

    need = needs.need_of(answer.workload)
    lines = heading(device, f"Recommended for {need.what}")
    if not answer.plans:
        lines += ["", "  no model of the catalog fits and is fast enough; the reasons:"]
    else:
        lines += ["", _HEAD]
        for i, plan in enumerate(answer.plans, 1):
            lines.append(_row(str(i), plan))
            reason = f"{plan.settings.n_ctx // 1024}k {plan.settings.kv_type} context; {plan.why}"
            lines += textwrap.wrap(reason, WIDTH - 4, initial_indent="    ", subsequent_indent="    ")
        lines += [
            "",
            *_footnotes(answer.plans, device, need.prompt_tokens),
            *further(answer.plans[0], "about the first:"),
        ]
    hidden = [r for r in answer.rejected if everything or r.kind in ("memory", "speed", "context")]
    if hidden:
        lines += ["", "Not offered:"]
        shown = hidden if everything else hidden[:_BIGGER_SHOWN]
        for r in shown:
            text = f"{r.model.name}: {r.reason}"
            lines += textwrap.wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="    ")
        if len(hidden) > len(shown):
            lines.append(f"  … and {len(hidden) - len(shown)} more (--all)")
    return lines


def further(plan: Plan, title: str) -> list[str]:
    """The plan's further reasons under a title: how far its context goes, the other engine, drafting."""
    lines = [title] if plan.reasons else []
    for reason in plan.reasons:
        lines += textwrap.wrap(reason, WIDTH - 2, initial_indent="  ", subsequent_indent="    ")
    return lines


def _footnotes(plans: Sequence[Plan], device: Device, prompt_tokens: int) -> list[str]:
    bases = list(dict.fromkeys(p.decode_tok_s.basis for p in plans))
    notes = [f"tok/s: 80 % range, context nearly empty; 1st: first token of {prompt_tokens:,}"]
    if any(p.backend == "mlx" for p in plans):
        notes.append("* runs on MLX; the others on llama.cpp")
    notes += textwrap.wrap("speeds from " + "; ".join(bases[:3]), WIDTH, subsequent_indent="  ")
    if not device.simulated:
        reference = f"{plans[0].model.id}:{plans[0].variant.quant}"
        notes += ["run the first:", f"  localllm pull {reference}", f"  localllm chat -m {reference}"]
    return notes


def model_table(model: Model, plans: Sequence[Plan], device: Device) -> list[str]:
    """Every variant of one model, whether it fits, and how memory grows with context."""
    lines = heading(device, f"{model.name}: every variant")
    lines += ["", f"  {'quant':12} {'file':>8} {'memory':>9} {'of usable':10} {'fits':5} {'tok/s':>9} {'longest':>8}"]
    for plan in plans:
        quant = plan.variant.quant + ("*" if plan.backend == "mlx" else "")
        share = plan.memory.total_bytes / max(1, plan.memory.limit_bytes)
        longest = f"{plan.max_ctx // 1024}k" if plan.max_ctx >= 1024 else "none"
        lines.append(
            f"  {_clip(quant, 12):12} {gb(plan.variant.file_bytes):>8} {gb(plan.memory.total_bytes):>9} "
            f"{bar(share):10} {plan.fits:5} {_speed(plan.decode_tok_s) if plan.fits != 'no' else '–':>9} {longest:>8}"
        )
    first = plans[0]
    lines += [
        "",
        f"memory at {first.settings.n_ctx:,} tokens of context; each further 1,024 tokens cost:",
        *(f"  {kind:9} {cost / 2**20:8.2f} MiB" for kind, cost in _slopes(model)),
        "longest: the context that still fits; tok/s: 80 % range, context nearly empty",
        *textwrap.wrap("speeds from " + first.decode_tok_s.basis, WIDTH, subsequent_indent="  "),
    ]
    if any(p.backend == "mlx" for p in plans):
        lines.append("* runs on MLX; the others on llama.cpp")
    return lines


def _slopes(model: Model) -> list[tuple[str, int]]:
    from localllm.planner import memory

    kinds = ("f16", "q8_0", "q4_0")
    return [(k, memory.kv_bytes_per_1k_tokens(model, k)) for k in kinds if memory.kv_type_allowed(model, k)]


def json_text(answer: Recommendation, device: Device) -> str:
    """The published JSON of an answer: keys sorted as in the schema, identical for identical inputs."""
    from localllm.device.describe import device_to_json
    from localllm.planner.serialise import recommendation_to_json

    return json.dumps(recommendation_to_json(answer, device_to_json(device)), indent=2, ensure_ascii=False)


def comparison(devices: Sequence[Device], answers: Sequence[Recommendation], *, as_json: bool) -> list[str]:
    """Machines side by side: each one's best plans, and the first machine's picks on all of them."""
    if as_json:
        from localllm.device.describe import device_to_json
        from localllm.planner.serialise import recommendation_to_json

        both = [recommendation_to_json(a, device_to_json(d)) for d, a in zip(devices, answers, strict=True)]
        return [json.dumps({"machines": both}, indent=2, ensure_ascii=False)]
    lines: list[str] = []
    for device, answer in zip(devices, answers, strict=True):
        lines += [*heading(device, "Best"), _HEAD]
        lines += [_row(str(i), plan) for i, plan in enumerate(answer.plans[:4], 1)]
        lines.append("")
    speeds: dict[str, list[str]] = {}
    for i, answer in enumerate(answers):
        for plan in answer.plans:
            speeds.setdefault(plan.model.name, ["–"] * len(answers))[i] = rate(plan.decode_tok_s.value)
    shared = [(name, row) for name, row in speeds.items() if sum(cell != "–" for cell in row) > 1]
    if shared:
        lines.append("tok/s of what both run: " + " / ".join(_clip(d.name, 20) for d in devices))
        lines += [f"  {_clip(name, 30):30} " + "  ".join(f"{cell:>6}" for cell in row) for name, row in shared]
    return lines


def check(device: Device, catalog: Catalog, *, as_json: bool) -> list[str]:
    """Predicted beside measured for every run this machine remembers, and what may be wrong where reality is slower."""
    from localllm.cli import measurements
    from localllm.planner import verify

    records = [r for r in measurements.load() if r.machine == device.name]
    results = []
    for r in records:
        known = measurements.for_planner([r], device.name, catalog.by_id)
        if known:
            others = measurements.for_planner([o for o in records if o != r], device.name, catalog.by_id)
            results.append(
                verify.compare(
                    device,
                    known[0],
                    others,
                    memory_bytes=r.memory_bytes,
                    predicted_memory_bytes=r.predicted_memory_bytes,
                )
            )
    if as_json:
        return [json.dumps({"runs": [verify.to_json(x) for x in results]}, indent=2, ensure_ascii=False)]
    if not results:
        return [f"nothing has been measured on {device.name} yet: run `localllm bench`"]
    lines = [f"Predicted beside measured on {device.name}", ""]
    lines.append(f"  {'model':28} {'quant':8} {'memory':>17} {'decode tok/s':>21}")
    for x in results:
        lines.append(f"  {_clip(x.name, 28):28} {_clip(x.quant, 8):8} {_pair(x.memory):>17} {_pair_rate(x.decode):>21}")
        for cause in x.causes:
            lines += textwrap.wrap(cause, WIDTH - 6, initial_indent="      ", subsequent_indent="      ")
    return lines


def _pair(value: tuple[float, float] | None) -> str:
    return "–" if value is None else f"{gb(value[0])} / {gb(value[1])}"


def _pair_rate(value: tuple[float, float]) -> str:
    predicted, measured = value
    return f"{rate(predicted)} / {rate(measured)} ({measured / predicted - 1:+.0%})"
