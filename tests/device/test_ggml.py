"""A child process asks the installed llama.cpp for its devices. Its answer is compared with the
probes."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from device import recordings
from localllm.device import backend_view, ggml, parts_table
from localllm.device.backend_view import query_build
from localllm.device.health import HealthFacts, health_checks
from localllm.device.machines import identify
from support.native_library import compile_library, include_folder

VULKAN_LINE = (
    "ggml_vulkan: 0 = Radeon 8060S Graphics (RADV GFX1151) (radv) | uma: 1 | fp16: 1 | bf16: 0 | "
    "fp4: 0 | warp size: 64 "
    "| shared memory: 65536 | int dot: 1 | matrix cores: KHR_coopmat"
)
CUDA_LINE = (
    "  Device 0: NVIDIA GeForce RTX 5090, compute capability 12.0, VMM: yes, VRAM: 32109 MiB"
)
METAL_LINES = (
    "ggml_metal_device_init: simdgroup matrix mul. = true",
    "ggml_metal_device_init: has bfloat            = true",
)


def answer(
    name: str, backend: str, total_bytes: int, *, kind: str = "gpu", said: tuple[str, ...] = ()
) -> ggml.GgmlBuild:
    return ggml.read(
        {
            "version": "0.3.36",
            "folder": "/somewhere/llama_cpp",
            "devices": [
                {
                    "name": name,
                    "description": "a device",
                    "backend": backend,
                    "type": kind,
                    "memory_free_bytes": total_bytes,
                    "memory_total_bytes": total_bytes,
                    "largest_buffer_bytes": None,
                    "id": "",
                    "capabilities": ["async"],
                }
            ],
            "features": {backend: {}},
            "said": list(said),
        }
    )


def cpu_build() -> ggml.GgmlBuild:
    return answer("CPU", "CPU", 16 << 30, kind="cpu")


def test_the_installed_build_names_its_processor() -> None:
    build = query_build()
    assert build.failure == ""
    (cpu,) = [device for device in build.devices if device.type == "cpu"]
    assert cpu.memory_total_bytes > 1 << 28
    assert cpu.description
    assert build.version
    assert "CPU" in build.features
    assert ggml.read(ggml.to_json(build)) == build


def broken_library(folder: Path, program: str) -> dict[str, str]:
    """Return an environment with a libllama that runs the C code `program` when it is loaded."""
    package = folder / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copytree(include_folder(), folder / "include")
    compile_library(
        f"""
        #include <stdlib.h>
        #include <unistd.h>
        __attribute__((constructor)) static void start(void) {{ {program} }}
        """,
        package / "lib" / "libllama.so",
    )
    search = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": search}


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("abort();", "signal SIGABRT"),
        ("", "exports no function"),
        ("pause();", "did not end in time"),
        ('write(1, "not JSON", 8); _exit(0);', "can't be read"),
    ],
)
def test_a_build_that_crashes_its_process_causes_one_message(
    tmp_path: Path, program: str, told: str
) -> None:
    build = query_build(
        broken_library(tmp_path, program),
        timeout_s=2.0 if told == "did not end in time" else 60.0,
    )
    assert told in build.failure
    (found,) = ggml.differences(identify(recordings.load("cpu_only_vm")), build)
    assert found.level == "error"
    assert told in found.message


def test_a_process_that_outlives_a_hanging_program_is_not_waited_for(tmp_path: Path) -> None:
    """It holds the output of the program open."""
    environment = broken_library(tmp_path, "fork() ? pause() : (int)sleep(60);")
    assert "did not end in time" in query_build(environment, timeout_s=2.0).failure
    left = [p for p in psutil.process_iter() if str(tmp_path) in environment_of(p)]
    assert len(left) == 1
    left[0].kill()


def environment_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.environ().get("PYTHONPATH", "")
    return ""


def test_messages_of_a_backend_on_standard_error_are_parsed_too(tmp_path: Path) -> None:
    """Backends that load with the bindings print before a log callback can be set."""
    (tmp_path / "localllm_backends" / "llamacpp").mkdir(parents=True)
    answered = ggml.to_json(answer("Vulkan0", "Vulkan", 1 << 30)) | {"said": []}
    for folder in ("localllm_backends", "localllm_backends/llamacpp"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "localllm_backends" / "llamacpp" / "devices.py").write_text(
        f"import sys\nprint({VULKAN_LINE!r}, file=sys.stderr)\nprint('a driver "
        f"greets')\nprint({json.dumps(answered)!r})\n"
    )
    build = query_build(
        {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        }
    )
    assert build.failure == ""
    assert "int dot: 1" in build.devices[0].details


@pytest.mark.parametrize(
    ("name", "backend", "said", "told"),
    [
        ("Vulkan0", "Vulkan", (VULKAN_LINE,), "matrix cores: KHR_coopmat"),
        ("Vulkan0", "Vulkan", (VULKAN_LINE,), "int dot: 1"),
        ("CUDA0", "CUDA", (CUDA_LINE,), "compute capability 12.0"),
        ("MTL0", "MTL", METAL_LINES, "simdgroup matrix mul.: true"),
        ("Vulkan1", "Vulkan", (VULKAN_LINE,), None),
    ],
)
def test_capabilities_are_parsed_from_the_log(
    name: str, backend: str, said: tuple[str, ...], told: str | None
) -> None:
    (device,) = answer(name, backend, 1 << 30, said=said).devices
    assert (told in device.details) if told else device.details == ()


def test_a_gpu_that_the_build_does_not_support_is_an_error_with_a_fix() -> None:
    (found,) = ggml.differences(identify(recordings.load("rtx_4070_desktop")), cpu_build())
    assert (found.level, found.fix) == ("error", "localllm setup")


def test_a_build_that_was_compiled_for_the_gpu_and_finds_none_points_at_the_driver() -> None:
    build = replace(cpu_build(), features={"CUDA": {"ARCHS": "890"}, "CPU": {}})
    (found,) = ggml.differences(identify(recordings.load("rtx_4070_desktop")), build)
    assert "driver" in found.message


def test_equal_memory_is_no_finding_and_less_memory_is_a_warning() -> None:
    machine = identify(recordings.load("rtx_4070_desktop"))
    assert ggml.differences(machine, answer("CUDA0", "CUDA", machine.memory.total_bytes)) == []
    (found,) = ggml.differences(machine, answer("CUDA0", "CUDA", machine.memory.total_bytes // 2))
    assert found.level == "warning"
    assert "usable" in found.message


def test_a_build_that_sees_one_of_two_cards_causes_a_warning() -> None:
    machine = identify(recordings.load("rtx_4090_two"))
    levels = {
        f.level
        for f in ggml.differences(machine, answer("CUDA0", "CUDA", machine.memory.total_bytes))
    }
    assert levels == {"warning"}


def test_a_limit_on_single_allocations_is_reported() -> None:
    machine = identify(recordings.load("strix_halo_raised"))
    build = answer("Vulkan0", "Vulkan", machine.memory.limit_bytes, kind="igpu")
    small = replace(build, devices=(replace(build.devices[0], largest_buffer_bytes=4 << 30),))
    assert any("one allocation" in f.message for f in ggml.differences(machine, small))


def test_doctor_lists_the_devices_or_reports_that_no_build_was_queried() -> None:
    machine = identify(recordings.load("rtx_4070_desktop"))
    asked = health_checks(
        machine, HealthFacts(llama_cpp=answer("CUDA0", "CUDA", machine.memory.total_bytes))
    )
    assert [c.status for c in asked if c.name == "llama.cpp device"] == ["ok"]
    assert [
        c.status for c in health_checks(machine, HealthFacts()) if c.name == "llama.cpp device"
    ] == ["not checked"]


@pytest.mark.parametrize("name", [n for n in recordings.names() if not n.startswith("mac")])
def test_plans_with_a_cpu_only_build_are_for_the_cpu(name: str) -> None:
    readings = recordings.load(name)
    machine, processor = identify(readings), identify(backend_view.without_gpus(readings))
    used = backend_view.as_build_uses(machine, processor, cpu_build())
    assert used.accelerator == "cpu"
    assert used.memory.limit_bytes <= processor.memory.total_bytes
    if machine.accelerator != "cpu":
        assert (used.kind, used.host) == ("system", None)
        assert any(f.fix == "localllm setup" for f in used.findings)


def test_plans_use_the_backend_that_supports_the_gpu() -> None:
    machine = identify(recordings.load("strix_halo_raised"))
    vulkan = answer("Vulkan0", "Vulkan", machine.memory.limit_bytes, kind="igpu")
    used = backend_view.as_build_uses(machine, machine, vulkan)
    assert (used.accelerator, used.memory) == ("vulkan", machine.memory)
    rocm = answer("ROCm0", "ROCm", machine.memory.limit_bytes)
    assert backend_view.as_build_uses(machine, machine, rocm) == machine


def test_a_missing_or_silent_engine_does_not_change_plans() -> None:
    machine = identify(recordings.load("rtx_4070_desktop"))
    assert backend_view.as_build_uses(machine, machine, None) == machine
    assert (
        backend_view.as_build_uses(
            machine, machine, ggml.GgmlBuild(failure="it did not end in time")
        )
        == machine
    )


@pytest.mark.parametrize(("kind", "expected"), [("gpu", "discrete"), ("igpu", "unified")])
def test_plans_are_for_a_gpu_that_only_the_build_knows(kind: str, expected: str) -> None:
    machine = identify(recordings.load("cpu_only_ddr4_one_stick"))
    used = backend_view.as_build_uses(
        machine, machine, answer("Vulkan0", "Vulkan", 2 << 30, kind=kind)
    )
    assert (used.kind, used.accelerator, used.memory.limit_bytes) == (expected, "vulkan", 2 << 30)
    assert used.host == (machine.memory if expected == "discrete" else None)
    like = parts_table.bandwidth_of_similar("", "", 2 << 30)
    assert used.bandwidth_gbps == (like if expected == "discrete" else machine.bandwidth_gbps)
    (finding,) = [
        f
        for f in ggml.differences(machine, answer("Vulkan0", "Vulkan", 2 << 30, kind=kind))
        if f.level == "warning"
    ]
    assert "did not report" in finding.message
