"""Detect this machine: probe it, identify it, and cache its measured memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm import paths
from localllm.device import backend_view, bandwidth, ggml
from localllm.device.machines import identify
from localllm.device.parsers.linux import last_level_cache_bytes
from localllm.device.probes import matrix_rate
from localllm.device.probes.systems import read
from localllm.device.types import Device, Figure, Readings


def detect(*, measure: bool = False) -> Device:
    """Return this machine as the installed build of llama.cpp can use it. Plans use this Device.

    It works like `hardware`, with three differences:

    - If the build cannot use the GPU, the Device is the processor, with a finding about that.
    - On a processor, `measure` also measures the build's matrix kernels, which takes some seconds
      more.
    - Figures that were measured on a busy machine and are due for another try are ignored, because
      a plan must not depend on the load.
    """
    readings = read(slow=measure)
    device = from_readings(readings, measure=measure, keep_figures=True)
    if device.accelerator == "metal":
        return device
    build = backend_view.installed_build()
    processor = device
    if (
        device.accelerator != "cpu"
        and build is not None
        and not build.failure
        and ggml.driving_accelerator(device, build) == "cpu"
    ):
        readings = backend_view.without_gpus(readings)
        processor = from_readings(readings, measure=measure, keep_figures=True)
    return with_matrix_rates(backend_view.as_build_uses(device, processor, build), measure=measure)


def hardware(*, measure: bool = False, remeasure: bool = False) -> Device:
    """Return this machine as a Device, regardless of the installed software, in well under 300 ms.

    The memory bandwidth comes from the table, the system or an earlier measurement. Otherwise,
    `measure` measures it first (about a second) and caches it. `remeasure` always measures. Raises
    DeviceUnreadableError on a system that does not report its memory.
    """
    return from_readings(read(slow=measure), measure=measure, remeasure=remeasure)


def from_readings(
    readings: Readings,
    *,
    measure: bool = False,
    remeasure: bool = False,
    keep_figures: bool = False,
) -> Device:
    """Do the work of `hardware` on readings that were already taken (doctor shares them).

    If `keep_figures`, ignore figures that are due for another measurement, because the machine was busy.
    """
    device = identify(readings)
    if not measures_ram(device):
        return device
    folder = paths.cache_dir()
    cache_key = _machine_key(device)
    new_figure: Figure | None = None
    if remeasure or (measure and bandwidth.FIGURES.due(folder, cache_key)):
        available_bytes = (device.host or device.memory).available_bytes
        measured_rates = bandwidth.measure_rates(
            available_bytes=available_bytes, cache_bytes=last_level_cache_bytes(readings)
        )
        new_figure = bandwidth.FIGURES.keep(folder, cache_key, measured_rates)
    if keep_figures:
        stored_rates = bandwidth.FIGURES.reliable(folder, cache_key)
    else:
        stored_rates = new_figure or bandwidth.FIGURES.cached(folder, cache_key)
    if stored_rates is None:
        return device
    with_bandwidth = identify(readings, stored_rates)
    figure = with_bandwidth.bandwidth_gbps
    if with_bandwidth.kind == "unified" and figure.basis == "measured":
        # The GPU may get more of the shared memory's bandwidth than the CPU's cores.
        floor = replace(figure, source=f"{figure.source}; by the CPU, so a lower bound")
        with_bandwidth = replace(with_bandwidth, bandwidth_gbps=floor)
    return with_bandwidth


def measures_ram(device: Device) -> bool:
    """Return True if a CPU measurement tells the bandwidth that a model gets.

    It does not on unified memory with a GPU that is faster than its CPU (Apple, GB10, Halo).
    """
    return device.kind != "unified" or device.bandwidth_gbps.basis == "assumed"


def with_matrix_rates(
    device: Device,
    *,
    measure: bool,
    types: Sequence[str] = matrix_rate.TYPES,
) -> Device:
    """Add the rates of the installed build's matrix kernels, if the model runs on the CPU.

    The rates of these `types` come from the cache, or are measured now if `measure` is set and they
    are due. A measurement takes about half a second a type. Rates that are due for another
    measurement are left out.
    """
    build = backend_view.build_identity() if device.accelerator == "cpu" else None
    if build is None:
        return device
    folder = paths.cache_dir()
    cache_key = f"{_machine_key(device)} | {build}"
    types_due = matrix_rate.due(folder, cache_key, types) if measure else ()
    measured_rates = matrix_rate.measure(types_due) if types_due else None
    if measured_rates is not None:
        matrix_rate.keep(folder, cache_key, measured_rates)
    return replace(device, matrix_rates=matrix_rate.reliable(folder, cache_key))


def _machine_key(device: Device) -> str:
    """Return the cache key of a measurement: the processor and its memory.

    Another cgroup limit gives another key.
    """
    pool = device.host or device.memory
    return f"{device.cpu or device.name} | {device.n_cpu_cores} cores | {pool.total_bytes} B"
