"""Detect this machine: probe, identify, and remember its measured memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm import paths
from localllm.device import bandwidth, ggml, in_use
from localllm.device.machines import identify
from localllm.device.parsers.linux import last_level_cache_bytes
from localllm.device.probes import matrix_rate
from localllm.device.probes.systems import read
from localllm.device.types import Device, Readings


def detect(*, measure: bool = False) -> Device:
    """This machine as the installed build of llama.cpp can use it: what plans are made for. As
    `hardware` does, but where that build has no use for the GPU, the Device is the processor, with
    a finding that says so; and of a processor `measure` takes the rates of that build's matrix
    kernels as well (some seconds more). A plan must not go by the load: what was measured in a busy
    moment, and is to be measured again, doesn't count."""
    readings = read(slow=measure)
    found = from_readings(readings, measure=measure, settled=True)
    if found.accelerator == "metal":
        return found
    build = in_use.build_here()
    processor = found
    if (
        found.accelerator != "cpu"
        and build is not None
        and not build.failure
        and ggml.driven_by(found, build) == "cpu"
    ):
        readings = in_use.without_gpus(readings)
        processor = from_readings(readings, measure=measure, settled=True)
    return with_matrix_rates(in_use.as_used(found, processor, build), measure=measure)


def hardware(*, measure: bool = False, remeasure: bool = False) -> Device:
    """This machine as a Device, whatever is installed on it, in well under 300 ms.

    With `measure`, memory bandwidth that neither the table, nor the system, nor an earlier
    measurement gives is measured first (about a second) and kept in the cache; `remeasure` measures
    in any case. Raises DeviceUnreadableError on a system that does not report its memory.
    """
    return from_readings(read(slow=measure), measure=measure, remeasure=remeasure)


def from_readings(
    readings: Readings, *, measure: bool = False, remeasure: bool = False, settled: bool = False
) -> Device:
    """`hardware` on readings taken already (doctor shares them). `reliable`: without figures of
    busy moments."""
    device = identify(readings)
    if not measures_ram(device):
        return device
    folder = paths.cache_dir()
    machine = _machine(device)
    if remeasure or (measure and bandwidth.SHELF.due(folder, machine)):
        available_bytes = (device.host or device.memory).available_bytes
        taken = bandwidth.rates(
            available_bytes=available_bytes, cache_bytes=last_level_cache_bytes(readings)
        )
        bandwidth.SHELF.keep(folder, machine, taken)
    if settled:
        kept = bandwidth.SHELF.reliable(folder, machine)
    else:
        kept = bandwidth.SHELF.cached(folder, machine)
    if kept is None:
        return device
    measured = identify(readings, kept)
    figure = measured.bandwidth_gbps
    if measured.kind == "unified" and figure.basis == "measured":
        # The GPU of one pool may get more than the CPU's cores.
        floor = replace(figure, source=f"{figure.source}; by the CPU, so a lower bound")
        measured = replace(measured, bandwidth_gbps=floor)
    return measured


def measures_ram(device: Device) -> bool:
    """True where a CPU measurement says something: not on one pool whose GPU outruns its CPU
    (Apple, GB10, Halo)."""
    return device.kind != "unified" or device.bandwidth_gbps.basis == "assumed"


def with_matrix_rates(
    device: Device,
    *,
    measure: bool,
    types: Sequence[str] = matrix_rate.TYPES,
) -> Device:
    """Where the processor computes: what the installed build's kernels make of matrices of these
    `types`, as kept or as measured now (half a second a type), in quiet alone."""
    build = in_use.identity() if device.accelerator == "cpu" else None
    if build is None:
        return device
    folder = paths.cache_dir()
    machine = f"{_machine(device)} | {build}"
    wanted = matrix_rate.due(folder, machine, types) if measure else ()
    taken = matrix_rate.measure(wanted) if wanted else None
    if taken is not None:
        matrix_rate.keep(folder, machine, taken)
    return replace(device, matrix_rates=matrix_rate.reliable(folder, machine))


def _machine(device: Device) -> str:
    """What a measurement belongs to: the processor and its memory; another cgroup limit is another
    machine."""
    pool = device.host or device.memory
    return f"{device.cpu or device.name} | {device.n_cpu_cores} cores | {pool.total_bytes} B"
