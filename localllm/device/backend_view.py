"""Describe the machine as the installed build of llama.cpp can use it. Plans use this description.

A child process queries the build for its devices, because a driver may crash or hang. The answer is
cached for a day, because drivers and cards change rarely. `localllm device` and `doctor` query the
build again. A build without accelerator libraries is not queried.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from localllm import json_store, paths
from localllm.device import cards, ggml, parts_table, usable
from localllm.device.accelerators import HIDING_VARIABLES, compiled_in
from localllm.device.probes import LIBRARY_VARIABLE, library_folder, programs
from localllm.device.types import Device, Finding, Memory, Readings

_MAX_AGE_S = 24 * 3600.0
# Environment variables that change the devices a build sees.
_VARIABLES = (*HIDING_VARIABLES, LIBRARY_VARIABLE)
_GPU_OUTPUTS = {"nvml", "nvidia-smi", "vulkaninfo", "display-class"}
_GPU_FILES = ("/sys/class/drm/", "/sys/class/kfd/", "/sys/bus/pci/", "/proc/device-tree/")


def installed_build(*, fresh: bool = False) -> ggml.GgmlBuild | None:
    """Return the build that a worker would run, with its devices, or None without llama-cpp-python.

    With `fresh`, query the build now, regardless of the cache and of the names of its libraries.
    """
    folder = library_folder()
    if folder is None:
        return None
    libraries = _libraries(folder)
    cache_file = paths.cache_dir() / "ggml_devices.json"
    key = _key(folder, libraries)
    if not fresh:
        if libraries and not any(compiled_in(name) for name, _, _ in libraries):
            return ggml.GgmlBuild(folder=str(folder.parent))
        cached_build = _cached_build(cache_file, key)
        if cached_build is not None:
            return cached_build
    build = query_build()
    if not build.failure:
        answer = ggml.to_json(build)
        json_store.keep(cache_file, {"key": key, "asked_s": time.time(), "answer": answer})
    return build


def build_identity() -> str | None:
    """Return a key that identifies the build a worker would run, or None without
    llama-cpp-python."""
    folder = library_folder()
    if folder is None:
        return None
    return _key(folder, _libraries(folder))


def _libraries(folder: Path) -> list[tuple[str, int, int]]:
    try:
        return sorted(
            (file.name, file.stat().st_size, file.stat().st_mtime_ns)
            for file in folder.iterdir()
            if file.is_file()
        )
    except OSError:
        return []


def _key(folder: Path, libraries: list[tuple[str, int, int]]) -> str:
    parts = [str(folder), libraries, [os.environ.get(name) for name in _VARIABLES]]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _cached_build(file: Path, key: str) -> ggml.GgmlBuild | None:
    cached = json_store.read(file)
    try:
        if cached["key"] != key or not 0 <= time.time() - cached["asked_s"] < _MAX_AGE_S:
            return None
        return ggml.read(cached["answer"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def without_gpus(readings: Readings) -> Readings:
    """Return the readings of the same machine without graphics."""
    files = {path: text for path, text in readings.files.items() if not path.startswith(_GPU_FILES)}
    outputs = {name: text for name, text in readings.outputs.items() if name not in _GPU_OUTPUTS}
    return replace(readings, files=files, outputs=outputs)


def as_build_uses(device: Device, processor: Device, build: ggml.GgmlBuild | None) -> Device:
    """Return `device` as `build` can use it.

    `processor` is the same machine without its GPUs. A Mac is returned unchanged, because MLX uses
    its GPU regardless of llama.cpp's build. `device` is also unchanged if the build could not be
    queried, because that is no reason to plan for less.
    """
    if build is None or build.failure or device.accelerator == "metal":
        return device
    if device.accelerator == "cpu":
        if build.gpus:
            return _from_ggml(device, build)
        return device
    driving_kind = ggml.driving_accelerator(device, build)
    if driving_kind != "cpu":
        driven_cards = tuple(replace(card, accelerator=driving_kind) for card in device.cards)
        used_device = replace(device, accelerator=driving_kind, cards=driven_cards)
        used_device = _with_all_cards(
            used_device, [gpu for gpu in build.gpus if gpu.accelerator == driving_kind]
        )
        return _limited_to_seen(used_device, processor.memory, build)
    message = f"{device.name} is not used, because the installed llama.cpp is a CPU build"
    return replace(
        processor,
        kind="system",
        accelerator="cpu",
        family="CPU",
        findings=(*processor.findings, Finding("warning", message, "localllm setup")),
    )


def _with_all_cards(device: Device, gpus: Sequence[ggml.GgmlDevice]) -> Device:
    """Return `device` with every card that the build uses.

    The build may know more cards: a second card of a kind that Windows' registry lists once, or,
    under Vulkan, a card of another vendor. Layers are divided over all of them, so plans count them
    too. They are ordered by PCI address.
    """
    own_cards = list(device.cards or (device,))
    if device.kind != "discrete" or len(gpus) <= len(own_cards):
        return device
    matched_cards = []
    for gpu in sorted(gpus, key=attrgetter("id")):
        matching_card = next(
            (card for card in own_cards if _same_card(card.name, gpu.description)), None
        )
        if matching_card is not None:
            own_cards.remove(matching_card)
        matched_cards.append(matching_card or _card(replace(device, cards=(), n_gpus=1), gpu))
    if own_cards:  # The build does not see one of our cards, so cards cannot be matched.
        return device
    n_more = len(matched_cards) - max(1, len(device.cards))
    message = f"{n_more} more cards were found only by the installed llama.cpp and are included"
    if n_more == 1:
        message = "1 more card was found only by the installed llama.cpp and is included"
    findings = (*device.findings, Finding("info", message))
    return replace(cards.combined(cards.numbered(matched_cards)), findings=findings)


def _same_card(name: str, description: str) -> bool:
    """Return True if the names from two drivers mean the same kind of card.

    Example: "Radeon RX 7900 XTX" and "AMD Radeon RX 7900 XTX (RADV NAVI31)".
    """
    short, long = sorted(
        (f"{parts_table.normalised_name(name)} ", f"{parts_table.normalised_name(description)} "),
        key=len,
    )
    return long.startswith(short)


def _card(device: Device, gpu: ggml.GgmlDevice) -> Device:
    """Return a card of `device`'s machine, described by ggml and the table."""
    total_bytes = gpu.memory_total_bytes
    used_bytes = total_bytes - min(gpu.memory_free_bytes, total_bytes)
    row = parts_table.by_gpu_name(gpu.description, total_bytes)
    card = replace(
        device,
        name=gpu.description or gpu.name,
        memory=usable.vram(total_bytes, used_bytes, 0, f"llama.cpp ({gpu.backend})"),
        **parts_table.device_fields(row),
    )
    if row is None:
        bandwidth = parts_table.bandwidth_of_similar("", "", total_bytes)
        return replace(
            card, family=gpu.accelerator, bandwidth_gbps=bandwidth, compute_capability=""
        )
    return replace(
        card,
        family=row.family,
        bandwidth_gbps=row.bandwidth(),
        compute_capability=row.compute_capability,
    )


def _limited_to_seen(device: Device, ram: Memory, build: ggml.GgmlBuild) -> Device:
    """Limit the memory of a processor's integrated graphics to the memory this build sees."""
    kind = device.accelerator
    if device.kind != "unified" or kind not in ("rocm", "vulkan"):
        return device
    total_bytes = sum(gpu.memory_total_bytes for gpu in build.gpus if gpu.accelerator == kind)
    if not total_bytes:
        return device
    memory = usable.limited_to_seen(device.memory, ram, total_bytes, f"llama.cpp ({kind})")
    return replace(device, memory=memory)


def _from_ggml(machine: Device, build: ggml.GgmlBuild) -> Device:
    """Return the Device of a GPU that the build uses but no probe knows.

    Its memory comes from ggml. An integrated GPU has the bandwidth of system memory. The bandwidth
    of other GPUs comes from the table, or from cards of similar size.
    """
    kind = build.accelerators[0]
    gpus = [gpu for gpu in build.gpus if gpu.accelerator == kind]
    gpus.sort(key=attrgetter("id"))
    message = f"{gpus[0].description} was found only by the installed llama.cpp"
    message = f"{message}, so its speed is a rough estimate"
    findings = (*machine.findings, Finding("info", message))
    machine = replace(machine, accelerator=kind, family=kind, match="", findings=findings)
    if any(gpu.type != "igpu" for gpu in gpus):
        host = machine.memory
        bandwidth = machine.bandwidth_gbps
        discrete = replace(machine, kind="discrete", host=host, host_bandwidth_gbps=bandwidth)
        return cards.combined(cards.numbered([_card(discrete, gpu) for gpu in gpus]))
    total_bytes = sum(gpu.memory_total_bytes for gpu in gpus)
    free_bytes = sum(min(gpu.memory_free_bytes, gpu.memory_total_bytes) for gpu in gpus)
    # The system's own use is counted in the system's memory account. `total_bytes` is all that the
    # driver lets a program use.
    memory = usable.vram(total_bytes, total_bytes - free_bytes, 0, f"llama.cpp ({gpus[0].backend})")
    available_bytes = min(free_bytes, machine.memory.available_bytes)
    memory = replace(memory, system_bytes=0, available_bytes=available_bytes)
    return replace(
        machine,
        name=gpus[0].description or gpus[0].name,
        kind="unified",
        memory=memory,
        n_gpus=len(gpus),
    )


# The first start of a CUDA or Metal library compiles or unpacks code. After this time we assume
# that the driver hangs.
_QUERY_TIMEOUT_S = 60.0


def query_build(
    environment: Mapping[str, str] | None = None, *, timeout_s: float = _QUERY_TIMEOUT_S
) -> ggml.GgmlBuild:
    """Query the build that a worker with this environment would run, and its devices.

    The default is the environment of this process. Never raises: if the query fails, the
    GgmlBuild's `failure` has the reason.
    """
    reply = programs.ask("llamacpp.devices", environment=environment, timeout_s=timeout_s)
    if reply.failure:
        return ggml.GgmlBuild(failure=f"during the search for devices, {reply.failure}")
    answer = reply.answers[-1]
    try:
        # Backends that load with the bindings log their devices to standard error.
        return ggml.read({**answer, "said": [*answer["said"], *reply.stderr_lines]})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        return ggml.GgmlBuild(failure=f"its answer can't be read ({type(e).__name__}: {e})")
