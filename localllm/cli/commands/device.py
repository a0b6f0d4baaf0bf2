"""`localllm device`: what this machine (or a named one) offers a model, and how each number is
known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.commands.shared import Json, show

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
        typer.Option("--ram", metavar="GB", help="System memory beside its GPU in GB."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure memory bandwidth now (about a second).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show usable memory, bandwidth and compute of this machine, or of one you name."""
    import sys
    from dataclasses import asdict

    from localllm.device import ggml, in_use
    from localllm.device.detect import hardware
    from localllm.device.named import resolve
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
        found = overridden(
            hardware(measure=measure, remeasure=measure), memory_gb=memory, bandwidth_gbps=bandwidth
        )
        build = in_use.build_here(fresh=True)
    found = with_memory(found, ram_gb=ram)
    body = device_to_json(found)
    if build is not None:
        differences = [asdict(finding) for finding in ggml.differences(found, build)]
        body |= {"llama_cpp": ggml.to_json(build), "differences": differences}
    show(as_json, body, lambda: [*lines(found), *(build_lines(found, build) if build else [])])


def build_lines(found: Device, build: ggml.GgmlBuild) -> list[str]:
    """What the installed llama.cpp can compute on, and where that is not what the system shows."""
    from localllm.cli import engine_builds
    from localllm.device import ggml
    from localllm.device.detect import detect

    out = [
        "",
        f"llama.cpp (llama-cpp-python {build.version}), devices:" if build.version else "llama.cpp",
    ]
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
        told = [*device.details, *device.capabilities]
        if told:
            out.append(f"            {', '.join(told)}")
    differences = ggml.differences(found, build)
    out += _finding_lines(differences)
    if any(finding.fix == "localllm setup" for finding in differences):
        out += [f"    {line}" for line in engine_builds.note(detect(), [])]
    return out


def lines(found: Device) -> list[str]:
    """The table as plain lines: figure, then how it is known."""
    host = found.host
    cores = f", {found.n_cpu_cores} cores" if found.n_cpu_cores else ""
    compute = (("FP16", found.fp16_tflops), ("FP8", found.fp8_tflops), ("FP4", found.fp4_tflops))
    there: tuple[tuple[str, str, str] | None, ...] = (
        ("kind", _kind(found), ""),
        _memory("memory", found.memory),
        None if host is None else _memory("host memory", host),
        ("bandwidth", *_figure(found.bandwidth_gbps, "GB/s")),
        None if host is None else ("host bandwidth", *_figure(found.host_bandwidth_gbps, "GB/s")),
        *((f"{k} compute", *_figure(f, "TFLOP/s dense")) for k, f in compute if f is not None),
        ("processor", f"{found.cpu}{cores}", "") if found.cpu else None,
        ("recognised as", found.match, "") if found.match else None,
    )
    rows = [row for row in there if row is not None]
    width = max(len(label) for label, _, _ in rows)
    value_width = max(len(value) for _, value, known in rows if known)
    out = [f"{found.name}{' (simulated)' if found.simulated else ''}"]
    for label, value, known in rows:
        out.append(f"  {label:<{width}}  {value:<{value_width}}  {known}".rstrip())
    return [
        *out,
        *[f"  · {account}" for account in found.accounts],
        *_finding_lines(found.findings),
    ]


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    out = []
    for finding in findings:
        out.append(f"  {'!' if finding.level != 'info' else '·'} {finding.message}")
        if finding.fix:
            out.append(f"      {finding.fix}")
    return out


def _kind(found: Device) -> str:
    words = {
        "unified": "one pool shared by CPU and GPU",
        "discrete": "GPU with its own memory",
        "system": "CPU only",
    }
    how: str = found.accelerator
    if found.compute_capability:
        how += f" {found.compute_capability}"
    return f"{words[found.kind]} ({how})"


def _memory(label: str, memory: Memory) -> tuple[str, str, str]:
    value = f"{memory.limit_bytes / 1e9:.1f} GB usable of {memory.total_bytes / 1e9:.1f}"
    if memory.available_bytes != memory.limit_bytes:
        value += f", {memory.available_bytes / 1e9:.1f} free now"
    return label, value, f"{memory.basis}: {memory.source}"


def _figure(figure: Figure | None, unit: str) -> tuple[str, str]:
    if figure is None:
        return "unknown", "not estimated"
    return f"{figure.value:g} {unit}", f"{figure.basis}: {figure.source}"
