"""Read the facts for `doctor` beyond the Device: the engine, disk, limits, power and swap."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import re
import shutil
import sys
from itertools import chain
from pathlib import Path

from localllm.device.health import BuildFacts, HealthFacts
from localllm.device.library_facts import version_in
from localllm.device.probes import library_folder, llama_cpp_folder, read_text, run


def read(cache: Path, data: Path) -> HealthFacts:
    """Return the facts for `health.health_checks`, except the build's own device list (see
    backend_view.py).

    Facts that could not be read stay None, so that they are reported as not checked.
    """
    if sys.platform == "darwin":
        pmset_text = run("/usr/bin/pmset", "-g", "custom")
    else:
        pmset_text = None
    free_bytes = {name: _free_bytes(path) for name, path in _disk_paths(cache, data).items()}
    return HealthFacts(
        build=llama_cpp_build(),
        disk_free_bytes={name: free for name, free in free_bytes.items() if free is not None},
        open_files=_open_files(),
        swap=_swap(),
        pressure=read_text("/proc/pressure/memory"),
        platform_profile=read_text("/sys/firmware/acpi/platform_profile"),
        on_battery=_on_battery(),
        pmset=pmset_text or None,
    )


def llama_cpp_build() -> BuildFacts | None:
    """Return the llama.cpp that workers run, from its files, or None without one.

    Its libraries are not loaded.
    """
    folder = library_folder()
    if folder is None:
        return None
    is_wheel = folder == llama_cpp_folder()
    if is_wheel:
        title = f"llama-cpp-python {version('llama-cpp-python') or ''}"
    else:
        title = f"llama.cpp {version_in(folder) or 'of an unknown version'} in {folder}"
    names = [path.name for path in folder.glob("*")]
    libraries = sorted(name for name in names if re.search(r"\.(so|dylib|dll)", name))
    cuda = next((folder / name for name in libraries if "ggml-cuda" in name), None)
    return BuildFacts(
        title=title,
        libraries=tuple(libraries),
        cuda_architectures=_cuda_architectures(cuda) if cuda is not None else (),
        is_wheel=is_wheel,
    )


def _cuda_architectures(library: Path) -> tuple[int, ...]:
    """Return the compute capabilities × 10 found inside libggml-cuda.

    They come from its ARCHS list ("750,860,1200") and from sm_/compute_ names in its code.
    """
    pattern = rb"\x00([0-9]{3,4}(?:,[0-9]{3,4})*)\x00|(?:sm|compute)_([0-9]{2,3})[af]?\b"
    try:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            matches = [m.groups(default=b"") for m in re.finditer(pattern, content)]
    except (OSError, ValueError):
        return ()
    numbers_listed = chain.from_iterable(archs.split(b",") for archs, _ in matches if archs)
    from_list = [int(number) // 10 for number in numbers_listed if 500 <= int(number) <= 2000]
    return tuple(sorted({*from_list, *(int(name) for _, name in matches if name)}))


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _disk_paths(cache: Path, data: Path) -> dict[str, Path]:
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return {"models": Path(hub).expanduser(), "cache": cache, "conversations": data}


def _free_bytes(path: Path) -> int | None:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _swap() -> tuple[int, int] | None:
    import psutil

    try:
        swap = psutil.swap_memory()
    except (OSError, RuntimeError):
        return None
    return int(swap.total), int(swap.used)


def _on_battery() -> bool | None:
    """Return True if this machine runs on its battery, or None if it does not report that."""
    import psutil

    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError):
        return None
    if battery is None or battery.power_plugged is None:
        return None
    return not battery.power_plugged
