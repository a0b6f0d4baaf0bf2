"""`localllm device`: show the hardware of this machine or a named one, and the source of each
number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.commands.shared import Json, print_json
from localllm.plain_output import print_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localllm.device import ggml
    from localllm.device.types import Device, Figure, Finding, Memory


def device(
    name: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help='Another machine, as you would type it: "M4 Max 128GB".',
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="GB", help="Its memory in GB.")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option("--bandwidth", metavar="GBPS", help="Its memory bandwidth in GB/s."),
    ] = None,
    ram: Annotated[
        float | None,
        typer.Option(
            "--ram", metavar="GB", help="System memory of the machine with that GPU, in GB."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure memory bandwidth now (about a second).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show usable memory, bandwidth and compute of this machine, or of one you name."""
    import sys
    from dataclasses import asdict

    from localllm.device import backend_view, ggml
    from localllm.device.detect import hardware
    from localllm.device.name_lookup import resolve
    from localllm.device.overrides import overridden, with_memory
    from localllm.device.types import device_to_json
    from localllm.errors import UsageError

    build = None
    if name is not None:
        if measure:
            raise UsageError("--measure measures this machine: it can't be combined with --device")
        found = resolve(name, memory_gb=memory, bandwidth_gbps=bandwidth)
    else:
        if measure:
            print("measuring memory bandwidth, about a second …", file=sys.stderr, flush=True)
        machine = hardware(measure=measure, remeasure=measure)
        found = overridden(machine, memory_gb=memory, bandwidth_gbps=bandwidth)
        build = backend_view.installed_build(fresh=True)
    found = with_memory(found, ram_gb=ram)
    body = device_to_json(found)
    if build is not None:
        differences = [asdict(finding) for finding in ggml.differences(found, build)]
        body |= {"llama_cpp": ggml.to_json(build), "differences": differences}
    if as_json:
        print_json(body)
        return
    print_lines(lines(found))
    if build is not None:
        print_lines(build_lines(found, build))


def build_lines(found: Device, build: ggml.GgmlBuild) -> list[str]:
    """Describe the devices of the installed llama.cpp, and differences from the system's
    hardware."""
    from localllm.cli import engine_builds
    from localllm.device import ggml
    from localllm.device.detect import detect

    title = "llama.cpp"
    if build.version:
        title = f"{build.title}, devices:"
    out = ["", title]
    for device in build.devices:
        memory = f"{device.memory_total_bytes / 1e9:.1f} GB"
        if device.accelerator != "cpu":
            memory = f"{device.memory_free_bytes / 1e9:.1f} of {memory} free"
        most = device.largest_buffer_bytes
        buffer = ""
        if most is not None:
            buffer = f", one buffer up to {most / 1e9:.1f} GB"
        out.append(
            f"  {device.name:<9} {device.description} ({device.backend}, {device.type}): "
            f"{memory}{buffer}"
        )
        facts = [*device.details, *device.capabilities]
        if facts:
            out.append(f"            {', '.join(facts)}")
    differences = ggml.differences(found, build)
    out += _finding_lines(differences)
    if any(finding.fix == "localllm setup" for finding in differences):
        out += [f"    {line}" for line in engine_builds.note(detect(), [])]
    return out


def lines(found: Device) -> list[str]:
    """Format the table as lines: each figure with its source."""
    rows = _rows(found)
    width = max(len(label) for label, _, _ in rows)
    value_width = max(len(value) for _, value, known in rows if known)
    simulated = " (simulated)" if found.simulated else ""
    out = [f"{found.name}{simulated}"]
    for label, value, known in rows:
        out.append(f"  {label:<{width}}  {value:<{value_width}}  {known}".rstrip())
    for account in found.accounts:
        out.append(f"  · {account}")
    return out + _finding_lines(found.findings)


def _rows(found: Device) -> list[tuple[str, str, str]]:
    """Return (label, figure, source) for each known figure."""
    rows = [("kind", _kind(found), ""), _memory("memory", found.memory)]
    if found.host is not None:
        rows.append(_memory("host memory", found.host))
    rows.append(_figure("bandwidth", found.bandwidth_gbps, "GB/s"))
    if found.host is not None:
        rows.append(_figure("host bandwidth", found.host_bandwidth_gbps, "GB/s"))
    if found.fp16_tflops is not None:
        rows.append(_figure("FP16 compute", found.fp16_tflops, "TFLOP/s dense"))
    if found.fp8_tflops is not None:
        rows.append(_figure("FP8 compute", found.fp8_tflops, "TFLOP/s dense"))
    if found.fp4_tflops is not None:
        rows.append(_figure("FP4 compute", found.fp4_tflops, "TFLOP/s dense"))
    if found.cpu:
        cores = f", {found.n_cpu_cores} cores" if found.n_cpu_cores else ""
        rows.append(("processor", f"{found.cpu}{cores}", ""))
    if found.match:
        rows.append(("recognised as", found.match, ""))
    return rows


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    out = []
    for finding in findings:
        sign = "·" if finding.level == "info" else "!"
        out.append(f"  {sign} {finding.message}")
        if finding.fix:
            out.append(f"      {finding.fix}")
    return out


def _kind(found: Device) -> str:
    text = "CPU only"
    if found.kind == "unified":
        text = "one pool shared by CPU and GPU"
    elif found.kind == "discrete":
        text = "GPU with its own memory"
    if found.compute_capability:
        return f"{text} ({found.accelerator} {found.compute_capability})"
    return f"{text} ({found.accelerator})"


def _memory(label: str, memory: Memory) -> tuple[str, str, str]:
    value = f"{memory.limit_bytes / 1e9:.1f} GB usable of {memory.total_bytes / 1e9:.1f}"
    if memory.available_bytes != memory.limit_bytes:
        value += f", {memory.available_bytes / 1e9:.1f} free now"
    return label, value, f"{memory.basis}: {memory.source}"


def _figure(label: str, figure: Figure | None, unit: str) -> tuple[str, str, str]:
    if figure is None:
        return label, "unknown", "not estimated"
    return label, f"{figure.value:g} {unit}", f"{figure.basis}: {figure.source}"
