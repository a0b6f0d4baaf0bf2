"""Where two engines can run one model: which is predicted faster, and the arithmetic that says why."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.device.types import Device
from localllm.planner import laws
from localllm.planner.types import Plan
from localllm_catalog.types import Variant

NAMES = {"llamacpp": "llama.cpp", "mlx": "MLX"}
# Files whose bits a weight differ by more than this are not two forms of the same choice.
_SAME_BITS = 0.25
# Closer than this the ranges overlap almost wholly: neither is called faster.
_WORTH_SAYING = 1.05


def nearest_of_other(plan: Plan, variants: Sequence[Variant]) -> Variant | None:
    """The variant of `variants` (of the other engine) whose file is nearest to the plan's; None beyond 25 %."""
    size = plan.variant.file_bytes
    near = sorted(variants, key=lambda v: (abs(v.file_bytes - size), v.quant))
    return near[0] if near and abs(near[0].file_bytes / size - 1) <= _SAME_BITS else None


def compare(device: Device, plan: Plan, other: Plan) -> str:
    """One sentence: the other engine's plan beside this one, and what makes the difference (bytes read, share of the
    bandwidth reached, fixed time a token; all three as predicted)."""
    ratio = other.decode_tok_s.value / plan.decode_tok_s.value
    named = f"{NAMES[other.backend]} ({other.variant.quant})"
    ours = f"{plan.decode_tok_s.value:.3g} tok/s of {NAMES[plan.backend]} ({plan.variant.quant})"
    if 1 / _WORTH_SAYING < ratio < _WORTH_SAYING:
        head = f"{named} is predicted as fast as the {ours}"
    else:
        word = "faster" if ratio > 1 else "slower"
        head = f"{named} is predicted {word}: {other.decode_tok_s.value:.3g} against the {ours}"
    there, here = _parts(device, other), _parts(device, plan)
    return (
        f"{head}; a token reads {there[0] / 1e9:.3g} against {here[0] / 1e9:.3g} GB at {there[1]:.0%} against "
        f"{here[1]:.0%} of the bandwidth, and costs {there[2] * 1e3:.1f} against {here[2] * 1e3:.1f} ms besides"
    )


def _parts(device: Device, plan: Plan) -> tuple[int, float, float]:
    """(bytes read, share of the bandwidth they are read at, fixed seconds) of one token with an empty context."""
    hardware = laws.hardware_of(device, plan.backend)
    terms = laws.decode_terms(plan.model, plan.variant, hardware)
    read = terms.streamed.total_bytes
    return read, read / (hardware.bandwidth_gbps * 1e9 * terms.memory_s), terms.total_s - terms.memory_s
