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
        machine = resolve(name, memory_gb=memory, bandwidth_gbps=bandwidth)
    else:
        if measure:
            print("measuring memory bandwidth, about a second …", file=sys.stderr, flush=True)
        this_machine = hardware(measure=measure, remeasure=measure)
        machine = overridden(this_machine, memory_gb=memory, bandwidth_gbps=bandwidth)
        build = backend_view.installed_build(fresh=True)
    machine = with_memory(machine, ram_gb=ram)
    body = device_to_json(machine)
    if build is not None:
        differences = [asdict(finding) for finding in ggml.differences(machine, build)]
        body |= {"llama_cpp": ggml.to_json(build), "differences": differences}
    if as_json:
        print_json(body)
        return
    print_lines(lines(machine))
    if build is not None:
        print_lines(build_lines(machine, build))


def build_lines(machine: Device, build: ggml.GgmlBuild) -> list[str]:
    """Describe the devices of the installed llama.cpp, and differences from the system's
    hardware."""
    from localllm.cli import engine_builds
    from localllm.device import ggml
    from localllm.device.detect import detect

    title = "llama.cpp"
    if build.version:
        title = f"{build.title}, devices:"
    text_lines = ["", title]
    for device in build.devices:
        memory_text = f"{device.memory_total_bytes / 1e9:.1f} GB"
        if device.accelerator != "cpu":
            memory_text = f"{device.memory_free_bytes / 1e9:.1f} of {memory_text} free"
        largest_bytes = device.largest_buffer_bytes
        buffer_text = ""
        if largest_bytes is not None:
            buffer_text = f", one buffer up to {largest_bytes / 1e9:.1f} GB"
        text_lines.append(
            f"  {device.name:<9} {device.description} ({device.backend}, {device.type}): "
            f"{memory_text}{buffer_text}"
        )
        facts = [*device.details, *device.capabilities]
        if facts:
            text_lines.append(f"            {', '.join(facts)}")
    differences = ggml.differences(machine, build)
    text_lines += _finding_lines(differences)
    if any(finding.fix == "localllm setup" for finding in differences):
        text_lines += [f"    {line}" for line in engine_builds.note(detect(), [])]
    return text_lines


def lines(machine: Device) -> list[str]:
    """Format the table as lines: each figure with its source."""
    rows = _rows(machine)
    width = max(len(label) for label, _, _ in rows)
    value_width = max(len(value) for _, value, source in rows if source)
    simulated = " (simulated)" if machine.simulated else ""
    text_lines = [f"{machine.name}{simulated}"]
    for label, value, source in rows:
        text_lines.append(f"  {label:<{width}}  {value:<{value_width}}  {source}".rstrip())
    for account in machine.accounts:
        text_lines.append(f"  · {account}")
    return text_lines + _finding_lines(machine.findings)


def _rows(machine: Device) -> list[tuple[str, str, str]]:
    """Return (label, figure, source) for each known figure."""
    rows = [("kind", _kind_text(machine), ""), _memory("memory", machine.memory)]
    if machine.host is not None:
        rows.append(_memory("host memory", machine.host))
    rows.append(_figure("bandwidth", machine.bandwidth_gbps, "GB/s"))
    if machine.host is not None:
        rows.append(_figure("host bandwidth", machine.host_bandwidth_gbps, "GB/s"))
    if machine.fp16_tflops is not None:
        rows.append(_figure("FP16 compute", machine.fp16_tflops, "TFLOP/s dense"))
    if machine.fp8_tflops is not None:
        rows.append(_figure("FP8 compute", machine.fp8_tflops, "TFLOP/s dense"))
    if machine.fp4_tflops is not None:
        rows.append(_figure("FP4 compute", machine.fp4_tflops, "TFLOP/s dense"))
    if machine.cpu:
        cores = f", {machine.n_cpu_cores} cores" if machine.n_cpu_cores else ""
        rows.append(("processor", f"{machine.cpu}{cores}", ""))
    if machine.match:
        rows.append(("recognised as", machine.match, ""))
    return rows


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    text_lines = []
    for finding in findings:
        sign = "·" if finding.level == "info" else "!"
        text_lines.append(f"  {sign} {finding.message}")
        if finding.fix:
            text_lines.append(f"      {finding.fix}")
    return text_lines


def _kind_text(machine: Device) -> str:
    text = "CPU only"
    if machine.kind == "unified":
        text = "one pool shared by CPU and GPU"
    elif machine.kind == "discrete":
        text = "GPU with its own memory"
    if machine.compute_capability:
        return f"{text} ({machine.accelerator} {machine.compute_capability})"
    return f"{text} ({machine.accelerator})"


def _memory(label: str, memory: Memory) -> tuple[str, str, str]:
    usable = f"{memory.limit_bytes / 1e9:.1f} GB usable of {memory.total_bytes / 1e9:.1f}"
    if memory.available_bytes != memory.limit_bytes:
        usable += f", {memory.available_bytes / 1e9:.1f} free now"
    return label, usable, f"{memory.basis}: {memory.source}"


def _figure(label: str, figure: Figure | None, unit: str) -> tuple[str, str, str]:
    if figure is None:
        return label, "unknown", "not estimated"
    return label, f"{figure.value:g} {unit}", f"{figure.basis}: {figure.source}"
