"""From a model and a speed back to the machines that reach it: which hardware to look for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from localllm.device.types import Device
from localllm.planner import needs, waiting
from localllm.planner.plan import NOTHING_FIXED, Overrides, plan_for
from localllm.planner.recommend import sound_variants
from localllm.planner.types import Plan, Workload
from localllm_catalog.types import Model


@dataclass(frozen=True, slots=True)
class Reach:
    """The machines that run a model at a speed, those with the slowest memory first, each in its smallest size that
    does; and the fastest one that holds the model and does not (None: every one that holds it does)."""

    found: tuple[tuple[Device, Plan], ...]
    nearest: tuple[Device, Plan] | None


def reaching(
    devices: Iterable[Device],
    model: Model,
    workload: Workload,
    tok_s: float,
    *,
    overrides: Overrides = NOTHING_FIXED,
) -> Reach:
    """Which of `devices` decode `model` at `tok_s` or more, in its best format of at least that speed.

    A format that loses more than a smaller model would is not considered, nor a plan whose prompt takes too long.
    """
    need = needs.need_of(workload)
    found: dict[str, tuple[Device, Plan]] = {}
    nearest: tuple[Device, Plan] | None = None
    for device in sorted(devices, key=lambda d: (_bandwidth(d), d.memory.limit_bytes, d.name)):
        if device.bandwidth_gbps is None or device.match in found:
            continue
        plans = [
            plan_for(device, model, variant, workload, overrides=overrides)
            for variant in sound_variants(device, model, overrides)
        ]
        whole = [p for p in plans if p.fits in ("yes", "tight") and not waiting.too_long(p, need)]
        fast = [p for p in whole if p.decode_tok_s.value >= tok_s]
        if fast:
            found[device.match] = device, max(fast, key=lambda p: (p.quality, p.decode_tok_s.value))
        elif whole:
            best = max(whole, key=lambda p: p.decode_tok_s.value)
            if nearest is None or best.decode_tok_s.value > nearest[1].decode_tok_s.value:
                nearest = device, best
    return Reach(tuple(found.values()), nearest)


def _bandwidth(device: Device) -> float:
    return device.bandwidth_gbps.value if device.bandwidth_gbps else 0.0
