"""Settings for the placement of layers and experts: parsed, and checked against a machine."""

from __future__ import annotations

from dataclasses import replace

from localllm.device.types import Device
from localllm.errors import UsageError
from localllm.planner.placement_search import OffloadOptions
from localllm.settings import Settings


def offload_options(settings: Settings) -> OffloadOptions:
    """Parse the requested placement of layers and experts. Raises UsageError for invalid
    numbers."""

    def number(name: str) -> int | None:
        text = str(settings.value(name)).lower()
        if text == "auto":
            return None
        if text == "all":
            return -1
        if not text.isdecimal():
            raise UsageError(
                f"{name} must be a number of layers, all or auto, not {text!r}", param=name
            )
        return int(text)

    split = _split(str(settings.value("split") or ""))
    return OffloadOptions(number("gpu_layers"), number("cpu_moe"), split)


def _split(text: str) -> tuple[float, ...] | None:
    """Parse each GPU's share of the layers; None if not given. Raises UsageError."""
    fault = UsageError(
        f"split must give each GPU's share, such as 3,1, not {text!r}", param="split"
    )
    try:
        shares = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise fault from None
    if not shares:
        return None
    if min(shares) < 0 or not any(shares):
        raise fault
    return shares


def requested_offload(settings: Settings, device: Device) -> OffloadOptions:
    """Return the requested placement for this machine's plan.

    If other machines hold layers too (`--with`), shares and layer counts apply to all of their
    devices. This machine's planner does not know those devices, so the values are removed here.
    """
    requested = offload_options(settings)
    workers = settings.value("workers")
    if not workers:
        return check_offload(requested, device)
    n_devices = len(workers)
    if device.accelerator != "cpu":
        n_devices += device.n_gpus
    n_shares = len(requested.tensor_split or ())
    if n_shares > n_devices:
        raise UsageError(
            f"split has {n_shares} shares, but the layers can be on {n_devices} devices",
            hint="the workers' shares come first, in the order of --with, "
            "then those of this machine's GPUs",
            param="split",
        )
    return replace(requested, gpu_layers=None, tensor_split=None)


def check_offload(requested: OffloadOptions, device: Device) -> OffloadOptions:
    """Return `requested`, or raise UsageError if `device` lacks the GPUs for it."""
    name = ""
    if (requested.gpu_layers or 0) > 0:
        name = "gpu_layers"
    elif requested.tensor_split:
        name = "split"
    if name and device.accelerator == "cpu":
        raise UsageError(
            f"{name}: {device.name} has no GPU for layers",
            hint="omit it, or choose another machine with --device",
            param=name,
        )
    n_shares = len(requested.tensor_split or ())
    if n_shares > device.n_gpus:
        gpus = "one GPU" if device.n_gpus == 1 else f"{device.n_gpus} GPUs"
        raise UsageError(
            f"split has {n_shares} shares, but {device.name} has {gpus}", param="split"
        )
    return requested
