"""Compare predicted with measured speeds, and name likely causes if the measured speed is too low."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.device.types import Device
from localllm.planner import speed
from localllm.planner.speed import Measured
from localllm.planner.types import Range

SHORTFALL = 0.30


@dataclass(frozen=True, slots=True)
class PredictionCheck:
    """(predicted, measured) decode of one run in tokens/s, and causes if it was too slow.

    `decode_short` is the same with the context nearly empty (None: not measured).
    """

    decode: tuple[float, float]
    basis: str
    causes: tuple[str, ...]
    decode_short: tuple[float, float] | None = None


def compare(device: Device, run: Measured, others: Sequence[Measured] = ()) -> PredictionCheck:
    """Compare `run` with the planner's prediction without it (but with `others`)."""

    def at(depth: int) -> Range:
        return speed.decode(device, run.model, run.variant, run.run, depth=depth, measured=others)

    predicted = at(run.depth)
    causes = likely_causes(
        device,
        predicted.value,
        run.decode_tok_s,
        speed.decode_bound(device, run.model, run.variant),
    )
    decode = (predicted.value, run.decode_tok_s)
    short = None
    if run.short_tok_s:
        short = (at(run.short_depth).value, run.short_tok_s)
    return PredictionCheck(decode, predicted.basis, causes, short)


def likely_causes(
    device: Device, predicted: float, measured: float, bound: float = 0.0
) -> tuple[str, ...]:
    """Return the usual causes of a speed `SHORTFALL` or more below the prediction, most likely
    first; () otherwise."""
    if measured >= predicted * (1 - SHORTFALL):
        if not bound or measured <= bound * 1.05:
            return ()
        return (
            "faster than the memory could deliver: the bandwidth known for this machine is too low",
        )
    is_gpu = device.accelerator != "cpu"
    causes = []
    if is_gpu and measured < 0.25 * predicted:
        causes.append("the engine may have fallen back to the CPU: see `localllm doctor`")
    if device.memory.available_bytes < 0.1 * device.memory.limit_bytes:
        causes.append(
            "memory is nearly full: the system may be swapping; "
            "close programs or pick a smaller plan"
        )
    if is_gpu:
        causes.append("another program may be using the GPU")
    else:
        causes.append("other programs may be using the processor's cores or its memory")
    causes.append(
        "a power-saving mode or a hot machine lowers clocks: "
        "plug in, let it cool, check the power mode"
    )
    if device.kind == "discrete":
        causes.append(
            "part of the model may be in system memory: lower --context or pick a smaller quant"
        )
    return tuple(causes)
