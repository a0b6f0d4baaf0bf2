"""Memory of recorded machines: the free amount at each place, and the largest model that may be
loaded there."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device import recordings
from localllm.device import backend_view, cards, ggml, usable
from localllm.device.machines import identify
from localllm.device.name_lookup import resolve
from localllm.device.overrides import with_memory
from localllm.device.parsers import macos
from localllm.device.types import Device, Readings
from localllm.errors import DoesNotFitError, UsageError
from localllm.memory.account import headroom_bytes, with_released
from localllm.memory.guard import check_load
from localllm.memory.system import SystemMemory
from localllm.planner.placement_search import verdict
from localllm.planner.types import MemoryNeed

FOLDER = Path(__file__).parent / "memory"
GB, MIB, GIB = 10**9, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Row:
    """Free GB, loadable GB, and the `basis` of the limit."""

    free: float
    loadable: float
    basis: str = "reported"


# Computed by hand from the readings. Macs: min(working set, level × RAM − headroom). Cards: free −
# margin. Carve-outs are counted separately.
TABLE = {
    "card_4090_desktop": Row(22.93, 22.93 - 0.515),
    "card_5090_two_busy": Row(5.80, 5.80 - 2 * 0.684),
    # Without a driver, only the system memory is used, not the cards.
    "card_3080_5090_3080_no_driver": Row(58.08, 58.08),
    # The minimum that Windows gives integrated graphics. Its driver may allow more.
    "card_arc130v_windows": Row(8.134, 8.134),
    # The integrated 740M does not count as a second card.
    "card_rx9070_beside_740m": Row(17.096, 17.096 - 0.342),
    "card_spark": Row(114.88, 114.88),
    "card_spark_query_na": Row(114.88, 114.88),
    "card_spark_page_cache": Row(114.88, 114.88),
    "halo_512mb": Row(120.27, 120.27),
    "halo_96gb": Row(102.71, 102.71),
    "mac_gh_runner_m1_virtual": Row(3.22, 3.22),
    "mac_m2_8gb_macos26": Row(2.05, 2.05),
    "mac_m2pro_32gb_macos26": Row(26.80, 26.80),
    "mac_m3pro_36gb": Row(25.77, 25.77, "assumed"),
    "mac_m3ultra_512gb_macos27": Row(412.3, 412.3, "assumed"),
    "mac_m4_16gb_macos26": Row(12.71, 12.71),
    "mac_m4_24gb_mlx_device_info": Row(17.18, 17.18),
    "mac_m4pro_24gb_macos15": Row(17.18, 17.18),
    "mac_m5_32gb_macos26": Row(26.80, 26.80),
    "mac_m5max_128gb_ioreg": Row(103.1, 103.1, "assumed"),
    "mac_m5max_wired_118000": Row(123.7, 123.7),
    "mac_m5pro_15core_16gpu": Row(17.18, 17.18, "assumed"),
    "mac_m6_32gb_macos27": Row(22.91, 22.91, "assumed"),
    "mac_mac_24gb_vmstat": Row(11.47, 11.47, "assumed"),
    "mac_macmini_32gb_pressure": Row(22.91, 22.91, "assumed"),
    "mac_rosetta_python": Row(7.73, 7.73),
}


def machine(name: str) -> Device:
    return identify(recordings.load(name, FOLDER))


def _verdict(device: Device, n_bytes: int) -> str:
    """Return the verdict for loading `n_bytes` on `device`: the plan's verdict, and on shared
    memory the load guard's limit first."""
    need = MemoryNeed(n_bytes, 0, 0, 0, 0, 0, device.usable_bytes)
    if device.kind != "discrete" and n_bytes > device.memory.loadable_bytes:
        return "no"
    return verdict(device, need)


@pytest.mark.parametrize("name", recordings.names(FOLDER))
def test_a_recorded_machine_has_the_expected_free_and_loadable_memory(name: str) -> None:
    row, device = TABLE[name], machine(name)
    memory = device.memory
    assert memory.available_bytes / GB == pytest.approx(row.free, rel=5e-3)
    assert memory.loadable_bytes / GB == pytest.approx(row.loadable, rel=5e-3)
    assert memory.basis == row.basis
    assert memory.source
    assert _verdict(device, memory.loadable_bytes + 1) == "no"
    assert _verdict(device, memory.loadable_bytes) == "tight"  # no memory is left
    assert _verdict(device, int(0.9 * min(memory.available_bytes, memory.loadable_bytes))) == "yes"


def test_the_table_covers_every_recording() -> None:
    assert set(recordings.names(FOLDER)) == set(TABLE)


def test_the_earlier_rules_fail_the_table() -> None:
    """The earlier rules: for Macs free and inactive memory less the headroom, for cards their
    total, and a carve-out counted as system memory."""
    wrong = []
    for name, row in TABLE.items():
        readings, memory = recordings.load(name, FOLDER), machine(name).memory
        free = macos.vm_stat(readings.output("vm_stat"))
        old = memory.limit_bytes
        if readings.system == "macos" and free is not None:
            old = min(old, free - headroom_bytes(memory.total_bytes))
        if memory.carve_out_bytes:
            old = memory.total_bytes - memory.limit_bytes
        if old / GB != pytest.approx(row.loadable, rel=5e-3):
            wrong.append(name)
    busy = {
        "mac_m2_8gb_macos26",
        "mac_m3pro_36gb",
        "mac_mac_24gb_vmstat",
        "mac_macmini_32gb_pressure",
    }
    assert busy | {"card_4090_desktop", "card_5090_two_busy", "halo_96gb"} <= set(wrong)


# --- by kind --------------------------------------------------------------------------------------

PAGE = 16384


def a_mac(
    total: int, pages: dict[str, int], level: int | None, working_set: int | None
) -> Readings:
    sysctl = f"machdep.cpu.brand_string: Apple M4\nhw.memsize: {total}\n"
    sysctl += "" if level is None else f"kern.memorystatus_level: {level}\n"
    listed = "".join(f"Pages {kind}: {n}.\n" for kind, n in pages.items())
    outputs = {
        "sysctl": sysctl,
        "vm_stat": f"Mach Virtual Memory Statistics: (page size of {PAGE} bytes)\n{listed}",
    }
    if working_set is not None:
        outputs["metal"] = f"recommendedMaxWorkingSetSize = {working_set} bytes"
    return Readings("macos", "arm64", {}, outputs)


@given(
    st.sampled_from([8, 16, 24, 36, 64, 128]),
    st.tuples(*[st.integers(1, 100)] * 5),
    st.integers(0, 100),
    st.booleans(),
)
def test_a_mac_may_load_the_memory_available_by_macos_less_the_headroom(
    gib: int, parts: tuple[int, ...], level: int, asked: bool
) -> None:
    total = gib * GIB
    kinds = ("free", "active", "inactive", "speculative", "wired down")
    pages = {
        kind: part * total // PAGE // sum(parts) for kind, part in zip(kinds, parts, strict=True)
    }
    working_set = int(0.7 * total) if asked else None
    told = identify(a_mac(total, pages, level, working_set)).memory
    limit = working_set or usable.mac_default(total)
    assert told.loadable_bytes == max(0, min(limit, total * level // 100 - headroom_bytes(total)))
    counted = identify(a_mac(total, pages, None, working_set)).memory
    had = PAGE * (sum(pages.values()) - pages["wired down"])
    assert counted.loadable_bytes == max(0, min(limit, had - headroom_bytes(total)))
    for memory in (told, counted):
        assert 0 <= memory.available_bytes <= memory.loadable_bytes <= memory.limit_bytes


@pytest.mark.parametrize(("level", "loadable"), [(88, 28.5), (50, 15.46), (5, 0.0)])
def test_the_memory_guard_of_a_mac_uses_the_same_account(level: int, loadable: float) -> None:
    said = {"hw.memsize": 32 * GIB, "kern.memorystatus_level": level}
    system = SystemMemory(read=lambda _: "", sysctl=said.get)
    account = identify(a_mac(32 * GIB, {"free": 1}, level, 31 * GIB)).memory
    assert account.loadable_bytes / GB == pytest.approx(loadable, rel=5e-3)
    guards = system.account()
    assert guards is not None
    check_load("m", account.loadable_bytes, guards)
    with pytest.raises(DoesNotFitError, match="other programs use"):
        check_load("m", account.loadable_bytes + MIB, guards)


@given(st.integers(4, 96), st.floats(0, 0.9), st.floats(0, 0.9))
def test_more_memory_in_use_on_a_card_never_increases_its_loadable_memory(
    gib: int, used: float, more: float
) -> None:
    total = gib * GIB
    one, other = (
        usable.vram(total, int(share * total), 300 * MIB, "t")
        for share in (min(used, more), max(used, more))
    )
    assert one.loadable_bytes >= other.loadable_bytes
    assert other.loadable_bytes <= max(0, other.available_bytes - usable.margin_bytes(total))
    back = with_released(other, total)
    assert back.loadable_bytes == usable.vram(total, 0, 300 * MIB, "t").loadable_bytes


def test_each_card_has_its_own_memory_account() -> None:
    device = machine("card_5090_two_busy")
    free = [(32607 - used) * MIB - int(0.02 * 32607 * MIB) for used in (29324, 30357)]
    assert [card.usable_bytes for card in device.cards] == pytest.approx(free, abs=2)
    assert device.usable_bytes == pytest.approx(sum(free), abs=4)
    freed = cards.with_released_bytes(device, 10 * GIB)
    assert freed.usable_bytes - device.usable_bytes == pytest.approx(10 * GIB, abs=4)
    assert all(
        a.usable_bytes > b.usable_bytes for a, b in zip(freed.cards, device.cards, strict=True)
    )


def _build(text: str, name: str, kind: str) -> ggml.GgmlBuild:
    """Return a build with one device, whose memory is read from its log."""
    found = re.search(r"\((\d+) MiB, (\d+) MiB free\)", text)
    assert found is not None
    device = ggml.GgmlDevice(
        f"{name}0", "a GPU", name, kind, int(found[2]) * MIB, int(found[1]) * MIB
    )
    return ggml.GgmlBuild(devices=(device,))


@pytest.mark.parametrize(
    ("log", "kind", "most_mib"),
    [
        (
            "Vulkan0: AMD Radeon 780M Graphics (RADV PHOENIX) (29696 MiB, 28598 MiB free)",
            "igpu",
            28598,
        ),
        (
            "Vulkan0: NVIDIA GeForce RTX 4060 Laptop GPU (7957 MiB, 7189 MiB free)",
            "gpu",
            7189 - 256,
        ),
        # Unified memory is enabled by its variable: ggml reports more free memory than there is.
        ("CUDA0: NVIDIA GeForce RTX 5090 (32106 MiB, 55372 MiB free)", "gpu", 32106 - 0.02 * 32106),
        ("CUDA0: NVIDIA GeForce GTX 1080 Ti (11165 MiB, 8720 MiB free)", "gpu", 8720 - 256),
        # Strix Halo on Windows: Vulkan's heap with 64 GB set aside, and with 96 GB, which is split
        # into two heaps.
        ("Vulkan0: AMD Radeon(TM) 8060S Graphics (65536 MiB, 62259 MiB free)", "igpu", 62259),
        ("Vulkan0: AMD Radeon(TM) 8060S Graphics (32768 MiB, 31129 MiB free)", "igpu", 31129),
    ],
)
def test_a_gpu_known_only_to_a_build_has_the_free_memory_that_the_build_reports(
    log: str, kind: str, most_mib: float
) -> None:
    files = {"/proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\n"}
    here = identify(Readings("linux", "x86_64", files))
    used = backend_view.as_build_uses(here, here, _build(log, log[: log.index("0:")], kind))
    assert used.memory.loadable_bytes / MIB == pytest.approx(most_mib, rel=1e-3)


@pytest.mark.parametrize(
    ("backend", "seen_gib", "gib"), [("ROCm", 96.0, 95.66), ("Vulkan", 111.5, 109.7)]
)
def test_the_usable_part_of_a_carve_out_depends_on_the_build(
    backend: str, seen_gib: float, gib: float
) -> None:
    """The limit is the build's own total, less the memory in use and the system's reserve."""
    readings = recordings.load("halo_96gb", FOLDER)
    processor = identify(backend_view.without_gpus(readings))
    gpu = ggml.GgmlDevice(
        f"{backend}0", "8060S", backend, "igpu", int(95.8 * GIB), int(seen_gib * GIB)
    )
    used = backend_view.as_build_uses(identify(readings), processor, ggml.GgmlBuild(devices=(gpu,)))
    assert used.memory.limit_bytes <= seen_gib * GIB
    assert used.memory.loadable_bytes / GIB <= gib + 1.9
    assert used.memory.loadable_bytes > 95 * GIB
    assert used.memory.carve_out_bytes == pytest.approx(103079215104 - 368111616)


def test_the_account_lists_loadable_total_reserved_and_used_memory() -> None:
    said = machine("card_4090_desktop").memory.account()
    assert (
        said
        == "22.4 GB for a model, of 25.8 GB: the system reserves 1.0 GB and other programs use 2.4 GB"
    )
    mac = replace(machine("mac_macmini_32gb_pressure").memory, source="Metal")
    assert mac.account().endswith("other programs use 4.1 GB and Metal allows 22.9 GB")


MACHINES = [
    "RTX 4090 + 64GB RAM",
    "2x RTX 3090 + 64GB RAM",
    "M4 Max 128GB",
    "DGX Spark",
    "Strix Halo 128GB",
]


@pytest.mark.parametrize("name", MACHINES)
def test_system_headroom_is_listed_and_never_increases_loadable_memory(name: str) -> None:
    device, before = resolve(name), None
    for keep in (0.0, 1.0, 6.0, 20.0, 40.0):
        left = with_memory(device, headroom_gb=keep)
        pool = (left.host if left.kind == "discrete" else left.memory) or pytest.fail(
            "no system memory"
        )
        assert pool.limit_bytes + keep * GB <= pool.total_bytes
        assert pool.loadable_bytes == pool.limit_bytes
        assert not keep or f"the system reserves {keep:.1f} GB" in pool.account()
        assert before is None or pool.loadable_bytes <= before
        before = pool.loadable_bytes
        if left.kind == "discrete":
            assert left.memory == device.memory
    with pytest.raises(UsageError, match="leaves no memory"):
        with_memory(device, headroom_gb=1000)


@pytest.mark.parametrize("name", MACHINES[:2])
def test_card_headroom_is_divided_among_cards_and_listed(name: str) -> None:
    device = resolve(name)
    left = with_memory(device, vram_headroom_gb=6)
    assert device.memory.limit_bytes - left.memory.limit_bytes == 6 * GB
    assert left.host == device.host
    assert "the system reserves 6.0 GB" in left.memory.account()
    assert sum(card.usable_bytes for card in left.cards) in (
        0,
        pytest.approx(left.usable_bytes, abs=4),
    )
    with pytest.raises(UsageError, match="leaves no memory"):
        with_memory(device, vram_headroom_gb=200)
