"""Posted machines: several cards, hidden cards, slices, cards of several makers, virtual machines.

Each case has the values of a public report, as the probes would have read them. Its name refers to
the report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from localllm.device import backend_view, ggml
from localllm.device.machines import identify
from localllm.device.parsers.gpus import visible_gpu_indices
from localllm.device.types import Device, Readings

GIB = 1 << 30
MEMORY = {"/proc/meminfo": "MemTotal: 65754412 kB\nMemAvailable: 60000000 kB\n"}


def linux(files: dict[str, str] | None = None, **outputs: str) -> Device:
    return identify(Readings("linux", "x86_64", MEMORY | (files or {}), outputs))


def nvidia(*gpus: dict[str, object]) -> str:
    return json.dumps(list(gpus))


def card(name: str, gib: float, uuid: str = "", **more: object) -> dict[str, object]:
    return {"name": name, "total": int(gib * GIB), "used": 0, "uuid": uuid, **more}


def drm(n: int, vendor: str, device: str, **files: str) -> dict[str, str]:
    folder = f"/sys/class/drm/card{n}/device"
    return {f"{folder}/vendor": vendor, f"{folder}/device": device} | {
        f"{folder}/{k}": v for k, v in files.items()
    }


def amd(n: int, device: str, vram_gib: float, gtt_gib: float, **files: str) -> dict[str, str]:
    memory = {
        "mem_info_vram_total": str(int(vram_gib * GIB)),
        "mem_info_gtt_total": str(int(gtt_gib * GIB)),
    }
    return drm(
        n, "0x1002", device, mem_info_vram_used="0", mem_info_gtt_used="0", **memory, **files
    )


def said(device: Device) -> str:
    return "\n".join(f"{finding.message} {finding.fix}" for finding in device.findings)


# --- which of several -----------------------------------------------------------------------------

MIXED = [
    card("NVIDIA GeForce RTX 3080", 10, "GPU-aaaa1111"),
    card("NVIDIA GeForce RTX 5090", 31.8, "GPU-bbbb2222"),
    card("NVIDIA GeForce RTX 3080", 10, "GPU-cccc3333"),
]


def test_cards_keep_the_order_of_their_addresses() -> None:
    """ollama#5239: CUDA numbers the fastest card first, the driver numbers by address. Plans use
    the driver's order."""
    device = linux(nvml=nvidia(*MIXED))
    assert [(c.number, c.match) for c in device.cards] == [
        (0, "GeForce RTX 3080"), (1, "GeForce RTX 5090"), (2, "GeForce RTX 3080"),
    ]  # fmt: skip
    assert device.n_gpus == 3


@pytest.mark.parametrize(
    ("variable", "matches"),
    [
        ("1", ["GeForce RTX 5090"]),
        ("2,1", ["GeForce RTX 5090", "GeForce RTX 3080"]),
        ("GPU-bbbb", ["GeForce RTX 5090"]),
        ("GPU-cccc3333, GPU-aaaa1111", ["GeForce RTX 3080", "GeForce RTX 3080"]),
        ("0,7,1", ["GeForce RTX 3080"]),  # a number without a GPU ends the list
        ("", []),
        ("-1", []),
        ("1,1", []),
    ],
)
def test_a_plan_is_for_the_cards_that_are_not_hidden(variable: str, matches: list[str]) -> None:
    device = linux(nvml=nvidia(*MIXED), environment=f"CUDA_VISIBLE_DEVICES={variable}")
    assert sorted(c.match for c in device.cards or ((device,) if matches else ())) == sorted(
        matches
    )
    assert [c.number for c in device.cards] == list(range(len(device.cards)))
    assert device.n_gpus == max(1, len(matches))
    assert (device.accelerator == "cpu") == (not matches)
    assert f"leaves {len(matches)} of 3" in said(device)
    assert "does not answer" not in said(device)


def test_a_visibility_variable_that_hides_no_card_is_not_mentioned() -> None:
    assert "VISIBLE" not in said(
        linux(nvml=nvidia(*MIXED), environment="CUDA_VISIBLE_DEVICES=0,1,2")
    )
    assert visible_gpu_indices(None, ["", ""]) == [0, 1]


def test_cards_of_amd_are_hidden_by_its_own_variables() -> None:
    files = amd(0, "0x744c", 24, 31, revision="0xc8") | amd(1, "0x744c", 20, 31, revision="0xcc")
    assert linux(files).n_gpus == 2
    device = linux(files, environment="HIP_VISIBLE_DEVICES=1")
    assert (device.n_gpus, device.match) == (1, "Radeon RX 7900 XT")


def test_the_probe_records_environment_variables_that_select_gpus() -> None:
    code = "from localllm.device.probes.systems import environment; print(environment())"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert "CUDA_VISIBLE_DEVICES=1" in done.stdout


# --- slices ---------------------------------------------------------------------------------------

REFUSED = (
    "name, memory.total [MiB], memory.used [MiB], compute_cap\n"
    "NVIDIA A100-SXM4-80GB, [Insufficient Permissions], [Insufficient Permissions], 8.0\n"
)


@pytest.mark.parametrize(
    "outputs",
    [
        {"nvidia-smi": REFUSED},  # StableSwarmUI#388
        {
            "nvml": nvidia(
                {"name": "NVIDIA A100-SXM4-80GB", "cc_major": 8, "cc_minor": 0, "bus_bits": 5120}
            )
        },
        # The parent reports all its memory.
        {"nvml": nvidia(card("NVIDIA H100 80GB HBM3", 80, mig=1))},
    ],
)
def test_a_slice_of_unknown_size_is_never_the_whole_card(outputs: dict[str, str]) -> None:
    device = identify(Readings("linux", "x86_64", MEMORY, outputs))
    assert device.accelerator == "cpu"
    assert "the size of its slice" in said(device)
    assert "--memory" in said(device)


@pytest.mark.parametrize(
    ("gpu", "gib", "gbps"),
    [
        (card("NVIDIA A100-SXM4-40GB", 40, mig=1, slices=[20 * GIB, 5 * GIB]), 20, 780.0),
        (card("GRID P40-24Q", 24), 24, 288.4),
        (card("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.75), 9.75, 248.5),
        (card("NVIDIA A40-12Q", 12), 12, 174.0),
    ],
)
def test_a_slice_of_known_size_has_that_memory_and_its_share_of_bandwidth(
    gpu: dict[str, object], gib: float, gbps: float
) -> None:
    device = linux(nvml=nvidia(gpu))
    assert device.memory.total_bytes == pytest.approx(gib * GIB, rel=1e-6)
    assert (device.match, device.bandwidth_gbps.basis) == ("", "assumed")
    assert device.bandwidth_gbps.value == gbps


def test_a_desktop_card_without_reported_memory_is_still_recognised() -> None:
    device = linux(nvml=nvidia({"name": "NVIDIA GeForce RTX 4090"}))
    assert (device.match, device.memory.total_bytes) == ("GeForce RTX 4090", 24 * GIB)


# --- other makers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (
            amd(1, "0x744c", 24, 31, revision="0xc8", board_info="type : cem\n"),
            "Radeon RX 7900 XTX",
        ),
        (drm(1, "0x8086", "0xe211"), "Arc Pro B60"),  # lmstudio#1216: an A2000 beside a B60
    ],
)
def test_a_card_of_another_vendor_next_to_an_nvidia_card_is_named(
    files: dict[str, str], name: str
) -> None:
    device = linux(files, nvml=nvidia(card("NVIDIA GeForce RTX 5060 Ti", 15.93)))
    assert (device.match, device.n_gpus) == ("GeForce RTX 5060 Ti 16 GB", 1)
    assert name in said(device)
    assert "setup --backend vulkan" in said(device)


def test_integrated_graphics_do_not_count_as_a_second_card() -> None:
    """A 9800X3D with a 7900 XTX, with and without the maker name "unknown" of memory chips."""
    for more in (
        {},
        {"mem_info_vram_vendor": "unknown"},
        {"mem_info_vram_vendor": "unknown", "revision": "0xc1"},
    ):
        files = amd(0, "0x13c0", 0.5, 31, **more) | amd(
            1, "0x744c", 24, 31, revision="0xc8", mem_info_vram_vendor="samsung"
        )
        device = linux(files)
        assert (device.n_gpus, device.match) == (1, "Radeon RX 7900 XTX"), more
        assert "also found" not in said(
            linux(amd(0, "0x13c0", 0.5, 31, **more), nvml=nvidia(card("RTX 4090", 24)))
        )


@pytest.mark.parametrize("device_id", ["0x164c", "0x15e7", "0x1681", "0x13fe", "0xffff"])
def test_an_apu_is_one_pool_whatever_its_id(device_id: str) -> None:
    carve_out = 12.0 if device_id == "0x13fe" else 0.5
    device = linux(amd(0, device_id, carve_out, 31, mem_info_vram_vendor="unknown"))
    assert device.kind == "unified"
    assert device.memory.limit_bytes > 20 * GIB


@pytest.mark.parametrize(
    ("pci", "row", "gib"),
    [
        ("0xe20b", "Arc B580", 12), ("0xe20c", "Arc B570", 10), ("0xe211", "Arc Pro B60", 24), ("0xe212", "Arc "
                                                                                                          "Pro "
                                                                                                          ""
                                                                                                          ""
                                                                                                          "B50", 16),
        ("0xe223", "Arc Pro B70", 32), ("0xe222", "Arc Pro B65", 32), ("0x56a2", "Arc "
                                                                                 "A580", 8), ("0x56a5", "Arc "
                                                                                                        "A380", 6),
    ],
)  # fmt: skip
def test_arcs_are_known_by_their_ids_and_several_count(pci: str, row: str, gib: int) -> None:
    """ollama#17088, llmfit#609."""
    one = linux(drm(0, "0x8086", pci))
    assert (one.match, one.accelerator, one.memory.total_bytes) == (row, "vulkan", gib * GIB)
    two = linux(drm(0, "0x8086", "0x7d67") | drm(1, "0x8086", pci) | drm(2, "0x8086", pci))
    assert (two.n_gpus, two.memory.total_bytes) == (2, 2 * gib * GIB)
    assert (
        linux(
            drm(0, "0x8086", pci) | drm(1, "0x8086", pci), environment="GGML_VK_VISIBLE_DEVICES=0"
        ).n_gpus
        == 1
    )


VULKAN = """GPU0:
	vendorID           = 0x8086
	deviceID           = 0x{id}
	deviceType         = PHYSICAL_DEVICE_TYPE_DISCRETE_GPU
	deviceName         = {name}
"""


def test_an_arc_with_an_unknown_id_is_identified_by_vulkan() -> None:
    slot = "DRIVER=xe\nPCI_SLOT_NAME=0000:03:00.0\n"
    vulkan = VULKAN.format(id="e2ff", name="Intel(R) Arc(tm) B580 Graphics (BMG G21)")
    assert linux(drm(0, "0x8086", "0xe2ff", uevent=slot), vulkaninfo=vulkan).match == "Arc B580"
    own = linux(drm(0, "0x8086", "0x5696", uevent=slot, lmem_total_bytes=str(6 * GIB)))
    assert (own.kind, own.memory.total_bytes) == ("discrete", 6 * GIB)
    assert (own.bandwidth_gbps.value, own.bandwidth_gbps.basis) == (186, "assumed")


def test_integrated_intel_graphics_do_not_count_as_a_card() -> None:
    slot = "DRIVER=i915\nPCI_SLOT_NAME=0000:00:02.0\n"
    assert linux(drm(0, "0x8086", "0x7d45", uevent=slot)).kind == "system"


@pytest.mark.parametrize(
    ("pci", "row"),
    [
        ("0x7d55", "Meteor Lake"), ("0x7d51", "Arrow Lake"), ("0x64a0", "Lunar Lake"), ("0xb080", "Arc "
                                                                                                  "B390"),
        ("0xb086", "Arc B390"), ("0xb083", "Arc B370"),
    ],
)  # fmt: skip
def test_arc_graphics_of_a_processor_are_known_by_their_ids(pci: str, row: str) -> None:
    device = linux(drm(0, "0x8086", pci, uevent="DRIVER=xe\nPCI_SLOT_NAME=0000:00:02.0\n"))
    assert (device.kind, device.accelerator) == ("unified", "vulkan")
    assert row in device.match


# --- cards that nobody lists ----------------------------------------------------------------------


def test_an_unknown_card_has_its_clocks_bandwidth_else_that_of_cards_like_it() -> None:
    files = amd(0, "0x7fff", 32, 31, board_info="")
    guessed = linux(files)
    assert (guessed.bandwidth_gbps.value, guessed.bandwidth_gbps.basis) == (512, "assumed")
    assert "--bandwidth GBPS" in said(guessed)
    node = "/sys/class/kfd/kfd/topology/nodes/1"
    kfd = {
        f"{node}/properties": f"simd_count 144\ngfx_target_version 100300\ndevice_id {0x7FFF}\n",
        f"{node}/mem_banks/0/properties": "heap_type 1\nwidth 256\nmem_clk_max 1000\n",
    }
    told = linux(files | kfd)
    assert (told.bandwidth_gbps.value, told.bandwidth_gbps.basis) == (512, "derived")
    large = nvidia(
        card("NVIDIA GB999", 251, cc_major=10, cc_minor=3),
        card("NVIDIA RTX PRO 2000 Blackwell", 15.9, cc_major=12, cc_minor=0),
    )
    both = linux(nvml=large)
    assert both.cards[0].bandwidth_gbps.value > both.cards[1].bandwidth_gbps.value
    assert both.bandwidth_gbps.basis == "assumed"


def test_the_driver_stack_of_a_card_is_one_that_builds_support() -> None:
    polaris = linux(amd(0, "0x67df", 8, 31, revision="0xe7"))
    assert polaris.accelerator == "vulkan"
    old = linux(nvml=nvidia(card("Tesla K99", 11, cc_major=3, cc_minor=7)))
    assert old.accelerator == "vulkan"
    assert "CUDA's builds no longer have code for 3.7" in said(old)
    beside = nvidia(
        card("NVIDIA GeForce RTX 3090", 24, cc_major=8, cc_minor=6),
        card("NVIDIA GeForce GT 710", 2, cc_major=3, cc_minor=5),
    )
    device = linux(nvml=beside)
    assert (device.name, device.accelerator) == ("NVIDIA GeForce RTX 3090", "cuda")
    assert "GT 710 was also found" in said(device)


def test_boards_and_apples_computers_are_called_by_their_names() -> None:
    cores = "".join(
        f"processor\t: {i}\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n\n" for i in range(4)
    )
    model = "/proc/device-tree/model"
    pi = linux({"/proc/cpuinfo": cores, model: "Raspberry Pi 5 Model B Rev 1.0\0"})
    assert (pi.name, pi.match) == ("Raspberry Pi 5 Model B Rev 1.0", "Raspberry Pi 5")
    assert pi.bandwidth_gbps.value == pytest.approx(17.1)
    asahi = linux({"/proc/cpuinfo": cores, model: "Apple MacBook Air (M1, 2020)"})
    assert (asahi.name, asahi.bandwidth_gbps.value) == ("Apple MacBook Air (M1, 2020)", 68)
    s390x = "vendor_id       : IBM/S390\n# processors    : 4\n\nprocessor 0: version = FF\n"
    assert linux({"/proc/cpuinfo": s390x}).n_cpu_cores == 4


def test_memory_high_limits_a_cgroup_before_memory_max() -> None:
    root = "/sys/fs/cgroup"
    limits = {f"{root}/memory.max": str(32 * GIB), f"{root}/memory.high": str(8 * GIB)}
    device = linux(limits | {f"{root}/memory.current": str(GIB)})
    assert device.memory.total_bytes == 8 * GIB
    assert "memory.high" in device.memory.source


# --- Windows --------------------------------------------------------------------------------------


def test_two_identical_cards_on_windows_are_two() -> None:
    key = r"HKEY_LOCAL_MACHINE\SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
    shown = "".join(
        f"{key}\\{i:04}\n    DriverDesc    REG_SZ    AMD Radeon RX 7900 XTX\n"
        "    HardwareInformation.qwMemorySize    REG_QWORD    0x5ff000000\n"
        "    MatchingDeviceId    REG_SZ    PCI\\VEN_1002&DEV_744C\n"
        for i in range(2)
    )
    outputs = {"memory-status": f"ullTotalPhys: {64 * GIB}\nullAvailPhys: {60 * GIB}\n"}
    device = identify(Readings("windows", "AMD64", {}, outputs | {"display-class": shown}))
    assert device.n_gpus == 2


def windows(processor: str, *adapters: str) -> Device:
    key = r"HKEY_LOCAL_MACHINE\SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
    shown = "".join(
        f"{key}\\{i:04}\n    DriverDesc    REG_SZ    {name}\n    MatchingDeviceId    REG_SZ    "
        "PCI\\VEN_8086&DEV_64A0\n"
        for i, name in enumerate(adapters)
    )
    outputs = {
        "memory-status": f"ullTotalPhys: {32 * GIB}\nullAvailPhys: {24 * GIB}\n",
        "processor": f"    ProcessorNameString    REG_SZ    {processor}\n",
        "display-class": shown,
    }
    return identify(Readings("windows", "AMD64", {}, outputs))


@pytest.mark.parametrize(
    ("processor", "adapter", "row", "gbps"),
    [
        # ollama#13153
        ("Intel(R) Core(TM) Ultra 5 238V", "Intel(R) Arc(TM) 130V GPU (16GB)", "Lunar Lake", 136.5),
        ("Intel(R) Core(TM) Ultra 7 258V", "Intel(R) Arc(TM) 140V GPU (16GB)", "Lunar Lake", 136.5),
        # llmfit#676
        ("Intel(R) Core(TM) Ultra 9 285H", "Intel(R) Arc(TM) 140T GPU (16GB)", "Arrow Lake", 102.4),
        ("Snapdragon(R) X2 Elite Extreme - X2E96100 - Qualcomm(R) Oryon(TM) CPU", "Qualcomm(R) "
                                                                                  "Adreno(TM) "
                                                                                  "X2-90 "
                                                                                  "GPU",
         "X2E-96-100", 228.0),
        ("Snapdragon(R) X Elite - X1E78100 - Qualcomm(R) Oryon(TM) CPU", "Qualcomm(R) Adreno(TM) "
                                                                         "X1-85 "
                                                                         "GPU", "X1E-80/78", 135.168),
    ],
)  # fmt: skip
def test_names_printed_by_windows_are_recognised(
    processor: str, adapter: str, row: str, gbps: float
) -> None:
    device = windows(processor, adapter)
    assert row in device.match
    assert device.bandwidth_gbps.value == gbps


# --- what the build sees --------------------------------------------------------------------------


def vulkan_build(*gpus: tuple[str, float, str]) -> ggml.GgmlBuild:
    found = [
        ggml.GgmlDevice(
            f"Vulkan{i}", name, "Vulkan", "gpu", int(gib * GIB), int(gib * GIB), id=address
        )
        for i, (name, gib, address) in enumerate(gpus)
    ]
    return ggml.GgmlBuild("0.3.36", "/somewhere", tuple(found))


def test_a_second_equal_card_listed_once_in_the_registry_is_counted() -> None:
    one = linux(amd(0, "0x744c", 24, 31, revision="0xc8", board_info="type : cem\n"))
    navi = "AMD Radeon RX 7900 XTX (RADV NAVI31)"
    used = backend_view.as_build_uses(
        one, one, vulkan_build((navi, 24, "0000:0b:00.0"), (navi, 24, "0000:03:00.0"))
    )
    assert (used.n_gpus, used.accelerator) == (2, "vulkan")
    assert [card.match for card in used.cards] == ["Radeon RX 7900 XTX"] * 2
    assert used.memory.total_bytes == 48 * GIB


def test_under_vulkan_cards_of_two_makers_share_a_model_in_the_order_of_their_addresses() -> None:
    nvidia_alone = linux(nvml=nvidia(card("NVIDIA GeForce RTX 5060 Ti", 15.93)))
    build = vulkan_build(
        ("NVIDIA GeForce RTX 5060 Ti", 15.93, "0000:41:00.0"),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", 24, "0000:03:00.0"),
    )
    used = backend_view.as_build_uses(nvidia_alone, nvidia_alone, build)
    assert [(c.number, c.match, c.accelerator) for c in used.cards] == [
        (0, "Radeon RX 7900 XTX", "vulkan"), (1, "GeForce RTX 5060 Ti 16 GB", "vulkan"),
    ]  # fmt: skip
    assert "1 more card" in said(used)


def test_a_build_that_misses_one_card_does_not_change_the_device() -> None:
    two = linux(
        nvml=nvidia(card("NVIDIA GeForce RTX 5090", 32), card("NVIDIA GeForce RTX 3090", 24))
    )
    for seen in (
        [("NVIDIA GeForce RTX 5090", 32, "")],
        [("NVIDIA GeForce RTX 5090", 32, ""), ("A", 8, ""), ("B", 8, "")],
    ):
        used = backend_view.as_build_uses(two, two, vulkan_build(*seen))  # type: ignore[arg-type]
        assert [c.match for c in used.cards] == [c.match for c in two.cards]
