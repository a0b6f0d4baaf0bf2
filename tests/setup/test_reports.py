"""Public reports of card owners: number in the collection, machine, and the right result. There are
37 reports, and a test counts them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device import recordings
from localllm.cli.commands import setup as command
from localllm.device import backend_view, ggml
from localllm.device.machines import identify
from localllm.device.name_lookup import resolve
from localllm.device.types import Device, Memory, Readings
from localllm.engine.cache import eviction
from localllm.engine.cache.store import KvStore
from localllm.engine.step_costs import PrefillCost
from localllm.load.options import load_spec
from localllm.planner.plan import plan_for
from localllm.planner.starting_settings import typical
from localllm.planner.types import Plan, Workload
from localllm.setup import build_check, builds
from localllm.setup.host import assumed
from localllm_backends import candidates
from localllm_backends.contract import Chunk
from localllm_backends.llamacpp import devices
from localllm_backends.llamacpp.context import model_params
from localllm_backends.llamacpp.native import start_native
from localllm_backends.values import SampleSpec
from localllm_catalog import catalog
from support.scripted_backend import ScriptedBackend

MORE = Path(__file__).parent / "recorded" / "machines"
MEMORY = Path(__file__).parents[1] / "device" / "memory"
ROOT = Path(__file__).parents[2]
MODELS = {m.id: m for m in catalog.load().models}
MIB, GIB = 1 << 20, 1 << 30
Facts = dict[str, object]


@dataclass(frozen=True)
class Report:
    """`says`: texts that the dry run contains, in this order. `never`: texts that it must not
    contain. `host`: differences from an ordinary system."""

    number: int
    what: str
    machine: str
    host: Facts
    says: tuple[str, ...]
    never: tuple[str, ...] = ()
    backend: str = ""


ARCH_LINUX: Facts = {
    "glibc": (2, 42),
    "gcc": 15,
    "nvcc": (13, 0),
    "nvcc_path": "/opt/cuda/bin/nvcc",
}
FEDORA_44: Facts = {"glibc": (2, 43), "gcc": 16, "nvcc": (13, 3), "nvcc_path": "/usr/bin/nvcc"}
REPORTS = [
    Report(4, "a Spark needs sm_121a alone", "gb10_table", {}, ("ARCHITECTURES=121a-real ",)),
    Report(6, "glibc 2.42 and CUDA 13.0", "rtx_5090_two", ARCH_LINUX, ("C library 2.42", ">=13.4"),
    ("/opt/cuda",)),
    Report(6, "glibc 2.42, no nvcc", "rtx_5090_two", {"glibc": (2, 42)}, (">=13.4",),
    ("==13.0.*'\n    $ link",)),
    Report(7, "GCC 16 of Fedora 44", "rtx_5090_two", FEDORA_44,
    ("does not support this system's GCC 16", ">=13.4")),
    Report(8, "3080, 5090 and 3080", "mixed_3080_5090_3080", {},
    ("86-real;120a-real", "CUDA 13.0", "Vulkan")),
    Report(12, "driver 550", "rtx_4090_two", {"cuda_driver": (12, 4)}, ("whl/cu124", "Vulkan"),
    ("==13.0",)),
    Report(12, "driver 535", "rtx_4070_desktop", {"cuda_driver": (12, 2)}, ("whl/cu122", "580")),
    Report(12, "driver 470", "rtx_4070_desktop", {"cuda_driver": (11, 4)}, ("update", "Vulkan")),
    Report(13, "V100", "tesla_v100", {},
    ("7.0 is covered", "whl/cu125", "else llama.cpp for Vulkan")),
    Report(13, "GTX 1080 Ti", "gtx_1080_ti", {"cuda_driver": (12, 2)},
    ("whl/cu122", "else llama.cpp for Vulkan")),
    Report(14, "NVML mismatch", "nvml_mismatch", {}, ("does not answer", "nvidia-smi"),
    ("no build needed",)),
    Report(15, "SIGILL of the wheel", "rtx_4090_two", {},
    ("whl/cu130", "native code of sm_89", "else llama.cpp for Vulkan")),
    Report(16, "Arc B580", "arc_b580", {}, ("whl/vulkan",)),
    Report(16, "an Arc that no table knows, forced", "cpu_only_vm", {}, ("whl/vulkan",),
    backend="vulkan"),
    Report(17, "two Arc Pro B60", "arc_b60_two", {}, ("2 × Arc Pro B60", "whl/vulkan")),
    Report(18, "140T", "intel_140t", {}, ("whl/vulkan",)),
    Report(19, "RTX A2000 and Arc B60", "a2000_and_b60", {},
    ("B60 was also found", "--backend vulkan", "whl/cu130")),
    Report(27, "ROCm 7.2 on Strix Halo", "halo_uma96", {"rocm": (7, 2)}, ("7.13",), backend="rocm"),
    Report(27, "ROCm 6 on Strix Halo", "halo_uma96", {"rocm": (6, 4)}, ("needs ROCm 7",),
    backend="rocm"),
    Report(27, "Strix Halo on Windows", "windows_halo_96", {},
    ("code for gfx1151", "whl/hip-radeon"), backend="rocm"),
    Report(29, "RX 9070 has code", "rx_9070_beside_740m", {"rocm": (7, 2)}, ("code for gfx1201",),
    backend="rocm"),
    Report(37, "hybrid laptop", "laptop_4060_arc", {}, ("whl/cu130",)),
]  # fmt: skip


def read(name: str) -> Readings:
    return recordings.load(name, MORE if name in recordings.names(MORE) else recordings.FOLDER)


def said(name: str, facts: Facts, backend: str = "") -> str:
    readings = read(name)
    machine = identify(readings)
    host = replace(assumed(machine), version="0.3.36", **facts)  # type: ignore[arg-type]
    return "\n".join(command.lines(machine, command.recipes_of(machine, host, backend)))


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report.number}: {report.what}")
def test_setup_chooses_the_right_build_for_reported_wrong_choices(report: Report) -> None:
    text = said(report.machine, report.host, report.backend)
    place = 0
    for words in report.says:
        assert words in text[place:], text
        place = text.index(words, place)
    for words in report.never:
        assert words not in text


def test_no_machine_with_a_gpu_gets_the_answer_no_build_needed() -> None:
    for folder in (recordings.FOLDER, MORE):
        for name in recordings.names(folder):
            machine = identify(recordings.load(name, folder))
            if machine.accelerator != "cpu":
                assert "no build needed" not in said(name, {}), name


# --- what is about more than builds ---------------------------------------------------------------


def planned(device: Device, model: str) -> Plan:
    files = [v for v in MODELS[model].variants if v.format == "gguf"]
    return plan_for(device, MODELS[model], typical(files), Workload())


def one_gpu(name: str, total_mib: int, free_mib: int) -> dict[str, Callable[..., Any]]:
    """Return a registry of ggml with a GPU of the given total and free memory, and the
    processor."""

    text = ctypes.create_string_buffer(name.encode())

    def properties(_: int, props: Any) -> None:
        """ggml-backend.h: name, description, free, total."""
        fields = ctypes.cast(props, ctypes.POINTER(ctypes.c_size_t))
        fields[0], fields[2], fields[3] = ctypes.addressof(text), free_mib * MIB, total_mib * MIB

    return {
        "ggml_backend_dev_count": lambda: 2,
        "ggml_backend_dev_get": lambda i: i,
        "ggml_backend_dev_type": lambda i: 1 - i,
        "ggml_backend_dev_get_props": properties,
    }


def spark_memory() -> None:
    """NVML reports no memory for a Spark, or counts the page cache as used. The system's available
    memory is used instead."""
    for name in ("gb10_not_supported", "gb10_table"):
        device = identify(read(name))
        assert (device.kind, device.match) == ("unified", "DGX Spark Founders Edition (GB10)")
    cached = identify(recordings.load("card_spark_page_cache", MEMORY)).memory
    assert cached.available_bytes == 118566368 * 1024 - cached.system_bytes


def spark_loads() -> None:
    """llama.cpp's automatic mode reads the file on devices that can't map it. The plan leaves the
    choice to llama.cpp, and the load passes it on."""
    plan = planned(resolve("DGX Spark"), "gpt-oss-20b")
    assert plan.settings.placement.weights == "auto"
    llama = start_native()
    params = model_params(llama, load_spec("x.gguf", plan.settings))
    assert params.load_mode == llama.LLAMA_LOAD_MODE_AUTO


def order_of_cards() -> None:
    device = identify(read("mixed_3080_5090_3080"))
    assert [(c.number, c.match) for c in device.cards] == [
        (0, "GeForce RTX 3080"), (1, "GeForce RTX 5090"), (2, "GeForce RTX 3080"),
    ]  # fmt: skip
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def unified_memory_switched_on() -> None:
    """Plans use the driver's figure. A query to ggml never returns more free memory than the
    total."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in one_gpu("CUDA0", 32106, 55372).items():
            patch.setattr(start_native(), name, function)
        (gpu,) = devices.accelerators()
    assert gpu.free_bytes == 32106 * MIB


def fits_one_card() -> None:
    assert planned(identify(read("mixed_3080_5090_3080")), "qwen3-8b").settings.placement.cards == (
        1,
    )


def used_by_others() -> None:
    """58 of 64 GB of two cards are in use. A model that fits the empty cards does not get "yes"."""
    busy, idle = identify(read("rtx_5090_two")), resolve("2x RTX 5090")
    assert planned(idle, "qwen3-32b").fits == "yes"
    assert planned(busy, "qwen3-32b").fits != "yes"
    assert busy.usable_bytes < 6 * GIB < idle.usable_bytes


def spills_nowhere() -> None:
    """WSL pages GPU memory out to system memory if the card is too full, instead of failing. A plan
    uses the free memory less a margin."""
    device = identify(read("wsl2_gtx1650_laptop"))
    assert device.os == "Linux (WSL2)"
    assert device.usable_bytes <= (4096 - 128) * MIB - 256 * MIB
    assert planned(device, "qwen3-8b").fits != "yes"


def arc_steps() -> None:
    for machine in ("Arc B580", "2x Arc Pro B60"):
        assert planned(resolve(machine), "qwen3-30b-a3b").settings.n_batch <= 1024


def gtt_limit() -> None:
    said = " ".join(f"{f.message} {f.fix}" for f in identify(read("strix_halo_default")).findings)
    assert "ttm.pages_limit" in said
    assert "gttsize" not in said


def carve_out_of_96_gib() -> None:
    """A model of 63 GB was rejected because of 22 GB of system memory. Memory in the carve-out does
    not count as system memory."""
    device = identify(read("halo_uma96"))
    assert device.memory.loadable_bytes > 90 * GIB
    plan = planned(device, "gpt-oss-120b")
    assert plan.fits == "yes"
    assert plan.memory.total_bytes <= device.memory.carve_out_bytes
    assert max(0, plan.memory.total_bytes - device.memory.carve_out_bytes) == 0, (
        "nothing is asked of the system"
    )


def seen_by(name: str, backend: str, total_gib: float, free_gib: float) -> Memory:
    readings = read(name)
    gpu = ggml.GgmlDevice(
        f"{backend}0", "8060S", backend, "igpu", int(free_gib * GIB), int(total_gib * GIB)
    )
    processor = identify(backend_view.without_gpus(readings))
    return backend_view.as_build_uses(
        identify(readings), processor, ggml.GgmlBuild(devices=(gpu,))
    ).memory


def rocm_and_vulkan_differ() -> None:
    assert seen_by("halo_uma96", "ROCm", 96.0, 95.8).limit_bytes == 96 * GIB
    vulkan = seen_by("halo_uma96", "Vulkan", 111.5, 111.0).limit_bytes
    assert 105 * GIB < vulkan <= 111.5 * GIB


def heaps_of_windows() -> None:
    """With 96 GB assigned to the GPU, the driver shows a heap of 32. The plan uses the size that
    the build sees, for any such size."""
    assert identify(read("windows_halo_96")).memory.limit_bytes == pytest.approx(
        111.5 * GIB, rel=0.01
    )
    for seen in (32.0, 64.0, 96.0, 111.5):
        assert seen_by("windows_halo_96", "Vulkan", seen, seen).limit_bytes <= seen * GIB


def rocm_reads() -> None:
    for name in ("rx_9070_beside_740m", "strix_halo_raised"):
        assert planned(identify(read(name)), "qwen3-8b").settings.placement.weights == "read"


def wrong_numbers_after_an_update() -> None:
    """A build whose driver has changed since its trial must be tried again. `doctor` also compares
    ten tokens."""
    build = builds.Build("rocm", "rocm", "", "0.3.36", "2026-11-01", drivers="6.17.1; amdgpu 6.14")
    assert not builds.why_stale(build, "6.17.1; amdgpu 6.14")
    assert "localllm setup" in builds.why_stale(build, "6.18.0; amdgpu 6.14")
    expected = build_check.ReferenceAnswer(Path(), tuple(range(10)), "H, I, J")
    garbage = {"gaps": [0.0, *[11.3] * 9], "text": "!!!!!!!!!!", "tokens": [0] * 10}
    assert "its tokens differ" in build_check.compare(expected, garbage).failure


def states_are_rare() -> None:
    backend = ScriptedBackend(n_ctx=2048, rewind="none", states=True)
    ticks = iter([0.0, 0.6])  # one fence for each tensor: 600 ms
    store = KvStore(backend, 1 << 30, clock=lambda: next(ticks))
    store.speed = PrefillCost(2e-3)
    assert store.store_state(backend.new_sequence(), np.zeros(0, np.int32)) == "free"
    assert store.state_interval(1000) >= 4096


def idle_lines_leave() -> None:
    """On a device, idle sequences may stay if attention over them takes at most 3 % of a step.
    Above that they are evicted."""
    able = replace(ScriptedBackend().capabilities, kv_on_device=True)
    idle = [eviction.IdleSequence(i, np.zeros(0, np.int32), exported=True) for i in range(2)]
    info, free = ScriptedBackend().info, 8192
    assert eviction.exporting_can_wait(able, info, free, 1, 0.02)
    assert not eviction.exporting_can_wait(able, info, free, 1, 0.04)
    assert eviction.sequences_to_evict(idle, able, busy=True, step_share=0.02) == []
    assert eviction.sequences_to_evict(idle, able, busy=True, step_share=0.04) == idle


def few_logits_cross() -> None:
    """The 256 largest logits of a row decide a top-k of 40, in one call for all streams. Choices
    that they can't decide stay open."""
    logits = np.sort(np.random.default_rng(0).normal(size=(32, 256)).astype(np.float32))[:, ::-1]
    top = candidates.TopRows(
        np.tile(np.arange(256, dtype=np.int32), (32, 1)), np.ascontiguousarray(logits)
    )

    def chosen(specs: list[SampleSpec]) -> list[int | None]:
        chunks = [Chunk(i, [0], sample=spec) for i, spec in enumerate(specs)]
        return candidates.TopKChooser(chunks, range(32)).of(top)

    drawn = chosen([SampleSpec(0.8, 40, 0.95, 0.05, i / 32) for i in range(32)])
    assert None not in drawn
    assert len(set(drawn)) > 4
    assert chosen([SampleSpec(1.0, 0, 1.0, 0.0, 0.5)] * 32) == [None] * 32


def containers() -> None:
    readings = read("strix_halo_default")
    closed = identify(replace(readings, outputs={**readings.outputs, "render-access": "denied"}))
    assert any("render" in f.fix for f in closed.findings if f.level == "error")
    old = said("rtx_4090_two", {"cuda_driver": (12, 4)})
    assert "whl/cu124" in old
    assert "whl/cu130" not in old, "a CUDA that is too new for the host's driver"
    recipe = (ROOT / "packaging/container/Containerfile.cuda").read_text(encoding="utf-8")
    assert "120a-real" in recipe
    assert "121a-real" in recipe


MORE_REPORTS: list[tuple[int, Callable[[], None]]] = [
    (1, spark_memory), (2, spark_loads), (5, unified_memory_switched_on), (9, order_of_cards),
    (10, fits_one_card),
    (11, used_by_others), (20, arc_steps), (21, gtt_limit), (22, carve_out_of_96_gib),
    (23, rocm_and_vulkan_differ),
    (24, heaps_of_windows), (25, rocm_reads), (26, rocm_reads), (28, wrong_numbers_after_an_update),
    (32, states_are_rare), (33, idle_lines_leave), (34, few_logits_cross), (35, containers),
    (36, spills_nowhere),
]  # fmt: skip
# docs/accelerators.md lists the evidence that would settle these.
UNSETTLED = {3, 30, 31}


@pytest.mark.parametrize(
    ("number", "right"), MORE_REPORTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_problems_from_user_reports_do_not_occur(number: int, right: Callable[[], None]) -> None:
    right()
    assert number not in UNSETTLED


def test_of_37_reports_34_are_right_and_the_others_are_named() -> None:
    right = {report.number for report in REPORTS} | {number for number, _ in MORE_REPORTS}
    assert right | UNSETTLED == set(range(1, 38))
    assert len(right - UNSETTLED) >= 34
    page = (ROOT / "docs/accelerators.md").read_text(encoding="utf-8")
    assert all(f"report {number}:" in page for number in UNSETTLED)
