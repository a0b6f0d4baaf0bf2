"""What a plan is asked for: the machine, by a name or this one, and the model, by what people type."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.planner.plan import Overrides
    from localllm.planner.types import Plan
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model


def device_named(name: str | None, memory: float | None, bandwidth: float | None) -> Device:
    """A machine by its name, or this one, as if it had other memory or bandwidth where they are given. Raises DeviceNotFoundError."""
    from localllm.device.detect import detect
    from localllm.device.named import overridden, resolve

    if name is not None:
        return resolve(name, memory_gb=memory, bandwidth_gbps=bandwidth)
    # The first time on an unknown machine its bandwidth is measured (a second), and what a processor multiplies; then remembered.
    here = detect(measure=True, say=lambda text: print(text, file=sys.stderr, flush=True))
    return overridden(here, memory_gb=memory, bandwidth_gbps=bandwidth)


def machine_of(name: str | None, memory_gb: float | None, catalog: Catalog) -> tuple[Device, Overrides]:
    """A machine (None: this one), with another memory where one is given, and what is known of speeds on it. Raises
    DeviceNotFoundError."""
    device = device_named(name, memory_gb, None)
    return device, overrides_for(device, catalog)


def overrides_for(device: Device, catalog: Catalog) -> Overrides:
    """What is known of speeds on `device`, and which engines this installation has."""
    from localllm.cli import measurements, shared_speeds
    from localllm.planner.plan import Overrides

    own = [] if device.simulated else [r for r in measurements.load() if r.machine == device.name]
    records = shared_speeds.for_machine(device.name, own)
    where = "here" if own else "by others"
    measured = measurements.for_planner(records, device.name, catalog.by_id, where=where)
    return Overrides(measured=measured, backends=registered_backends())


def registered_backends() -> tuple[str, ...]:
    """Names of the engines this installation has: what it can't run it does not recommend, on any machine."""
    from importlib.metadata import entry_points

    return tuple(sorted({entry.name for entry in entry_points(group="localllm.backends")})) or ("llamacpp",)


def find_model(reference: str, catalog: Catalog, *, offline: bool = False) -> tuple[Model, str]:
    """What a person calls a model, and the quant asked for ("" = any): a catalog id, a file or folder, a repository or its
    address, a name on this disk.

    Raises ModelNotFoundError, also for a quant that the model does not have, ModelFileError, DownloadError and UsageError.
    """
    from localllm.library.described import describe

    return describe(reference, catalog, offline=offline)


def of_quant(plans: list[Plan], quant: str) -> list[Plan]:
    """Those of `plans` in the quant asked for ("" = all). Raises ModelNotFoundError where this machine reads only others."""
    from localllm.errors import ModelNotFoundError
    from localllm.library.names import same_quant

    found = [p for p in plans if not quant or same_quant(quant, p.variant.quant)]
    if plans and not found:
        listed = ", ".join(dict.fromkeys(p.variant.quant for p in plans))
        raise ModelNotFoundError(
            f"no engine for this machine reads {plans[0].model.name} in {quant}", hint=f"it reads {listed}"
        )
    return found
