"""The memory guard keeps headroom for the system: it refuses loads that would take it, the cache
gives memory back, and no request waits forever."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import DoesNotFitError
from localllm.memory.account import headroom_bytes, shared_pool
from localllm.memory.guard import MemoryGuard, check_load, judge
from localllm.memory.macos import Pressure
from localllm.memory.system import SystemMemory, process_and_children, return_to_system

MB = 10**6
GIB = 2**30
HEADROOM = 100 * MB


# --- the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "kept"),
    [
        (None, 0),
        (GIB, GIB // 8),
        (8 * GIB, GIB // 2),
        (24 * GIB, 24 * GIB // 20),
        (128 * GIB, 128 * GIB // 20),
    ],
)
def test_the_system_keeps_5_percent_at_least_half_a_gib_and_never_over_an_eighth(
    total: int | None, kept: int
) -> None:
    assert headroom_bytes(total) == pytest.approx(kept, abs=1)


def test_levels_start_at_their_marks_and_end_a_quarter_above() -> None:
    story = [120, 99, 110, 124, 126, 99, 51, 49, 60, 74, 76, 124, 125, None]
    level: Pressure = "none"
    levels = [level := judge(now, 100, level) for now in story]
    assert levels == [
        "none", "shrink", "shrink", "shrink", "none", "shrink", "shrink", "hold", "hold", "hold",
        "shrink", "shrink",
        "none", "none",
    ]  # fmt: skip


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.sampled_from(["none", "shrink", "hold"]))
def test_more_memory_is_never_more_pressure(available: int, more: int, before: Any) -> None:
    order = ["hold", "shrink", "none"]
    headroom = 10**11
    assert order.index(judge(available, headroom, before)) <= order.index(
        judge(available + more, headroom, before)
    )


def test_unknown_memory_is_no_pressure_and_no_headroom_is_no_guard() -> None:
    assert judge(None, HEADROOM, "hold") == "none"
    guard = MemoryGuard(lambda: pytest.fail("nobody asked for a guard"), 0)
    assert not guard.update(0.0)
    assert guard.snapshot() == {"headroom_bytes": 0, "pressure": "none"}


def test_the_system_is_asked_at_most_four_times_a_second() -> None:
    looks: list[float] = []
    now = 0.0
    guard = MemoryGuard(lambda: looks.append(now) or GIB, HEADROOM)  # type: ignore[func-returns-value]
    for i in range(2001):
        now = i / 1000
        guard.update(now)
    assert looks == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


def test_a_load_must_leave_the_headroom_and_the_refusal_has_all_figures() -> None:
    account = shared_pool(1500 * MB, 1000 * MB, "test", 100 * MB)
    check_load("m", 900 * MB, account)
    check_load("m", 0, shared_pool(1500 * MB, 1, "test", 100 * MB))  # the model's size is unknown
    check_load("m", 900 * MB, None)  # the free memory is unknown: the plan decides
    check_load("m", 9000 * MB, shared_pool(1500 * MB, 1, "test", 0))  # no headroom is to be kept
    with pytest.raises(DoesNotFitError) as refused:
        check_load("m.gguf", 901 * MB, account)
    assert refused.value.message == (
        "m.gguf needs 0.90 GB, but only 0.90 GB are free for it now: 1.00 GB available, of which "
        "0.10 "
        "GB stay with the "
        "system; other programs use 0.50 GB of 1.50 GB"
    )
    assert "close other programs" in refused.value.hint


# --- reading the system's memory ------------------------------------------------------------------

MEMINFO = "MemTotal:       16000 kB\nMemFree:          100 kB\nMemAvailable:   12000 kB\n"
KIB = 1024


def system(files: dict[str, str], users: tuple[int, ...] = ()) -> SystemMemory:
    there = {"/proc/meminfo": MEMINFO, **files}
    return SystemMemory(lambda: users, lambda path: there.get(path, ""))


def test_page_cache_is_available_but_not_the_weights_that_a_worker_has_mapped() -> None:
    assert system({}).total_bytes == 16000 * KIB
    assert system({}).available_bytes() == 12000 * KIB
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
    loaded = system(
        {"/proc/7/statm": "900 500 100 1 0 300 0", "/proc/8/statm": "9 5 10 1 0 3 0"}, (7, 8, 9)
    )
    assert loaded.available_bytes() == 12000 * KIB - 110 * page  # process 9 has ended


def test_a_containers_limit_counts_and_its_page_cache_is_available() -> None:
    group = "/sys/fs/cgroup/box"
    inside = system(
        {
            "/proc/self/cgroup": "0::/box/inner\n",
            f"{group}/memory.max": "8000000\n",
            f"{group}/memory.current": "7000000\n",
            f"{group}/memory.stat": "anon 1000000\ninactive_file 2000000\nactive_file "
            "4000000\nslab "
            "7\n",
            "/sys/fs/cgroup/box/inner/memory.max": "max\n",
        }
    )
    assert inside.total_bytes == 8_000_000
    assert inside.available_bytes() == 7_000_000


def test_the_older_cgroups_are_read_too_and_no_limit_is_none() -> None:
    root = "/sys/fs/cgroup/memory"
    v1 = {
        "/proc/self/cgroup": "12:cpu,cpuacct:/x\n5:memory:/docker/abc\n",
        f"{root}/memory.limit_in_bytes": "9223372036854771712",
        f"{root}/memory.usage_in_bytes": "1",
    }
    assert system(v1).total_bytes == 16000 * KIB
    v1[f"{root}/docker/abc/memory.limit_in_bytes"] = "4096000"
    v1[f"{root}/docker/abc/memory.usage_in_bytes"] = "4000000"
    v1[f"{root}/docker/abc/memory.stat"] = "total_inactive_file 1000\ntotal_active_file 2000"
    assert system(v1).available_bytes() == 99_000


def test_reserved_huge_pages_do_not_reduce_available_memory() -> None:
    huge = {
        "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 60 kB\nHugePages_Total: "
        "9\nHugePages_Free: "
        "0\n"
    }
    assert system(huge).available_bytes() == 60 * KIB


def test_without_mem_available_free_and_cached_memory_count_except_shared_memory() -> None:
    """Kernels before 3.14 and WSL 1: tmpfs counts as cached, but can't be dropped."""
    old = {
        "/proc/meminfo": "MemTotal: 100 kB\nMemFree: 10 kB\nBuffers: 1 kB\nCached: 50 "
        "kB\nShmem: "
        "30 "
        "kB\n"
    }
    assert system(old).available_bytes() == 31 * KIB


@pytest.mark.parametrize(("level", "means"), [(1, "none"), (2, "shrink"), (4, "hold")])
@pytest.mark.parametrize("percent", [1, 50, 99])
def test_macos_reports_its_memory_pressure_level(level: int, means: str, percent: int) -> None:
    """The pressure level that macOS reports decides, for any available memory. macOS compresses and
    swaps long before a Mac runs out of memory, and then reports pressure."""
    said = {
        "hw.memsize": 16 * GIB,
        "kern.memorystatus_level": percent,
        "kern.memorystatus_vm_pressure_level": level,
    }
    mac = SystemMemory(read=lambda _: "", sysctl=said.get)
    guard = MemoryGuard(mac.available_bytes, headroom_bytes(mac.total_bytes), mac.pressure)
    assert guard.update(0.0)
    assert guard.pressure == means
    assert guard.missing_bytes > 0 or (means == "none" and percent > 1)
    assert (guard.free_bytes or 0) == (
        0 if means != "none" else max(0, 16 * GIB * percent // 100 - headroom_bytes(16 * GIB))
    )


@pytest.mark.parametrize("level", [None, 0, 3, 99])
def test_with_an_unknown_macos_level_available_memory_decides(level: int | None) -> None:
    mac = SystemMemory(read=lambda _: "", sysctl={"kern.memorystatus_vm_pressure_level": level}.get)
    for available, means in ((2 * GIB, "none"), (90 * MB, "shrink"), (10 * MB, "hold")):
        guard = MemoryGuard(lambda free=available: free, HEADROOM, mac.pressure)  # type: ignore[misc]
        guard.update(0.0)
        assert guard.pressure == means


def test_available_memory_is_unknown_if_the_system_does_not_report_it() -> None:
    assert system({"/proc/meminfo": "MemTotal: 100 kB"}).available_bytes() is None


def test_this_machine_reports_available_and_total_memory() -> None:
    memory = SystemMemory(process_and_children)
    available, total = memory.available_bytes(), memory.total_bytes
    assert available is not None
    assert total is not None
    assert 0 < available < total


def test_freed_blocks_go_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    keepers, blocks = [], []
    for _ in range(600):
        blocks.append(os.urandom(100_000))
        # kept between the blocks, so that freeing alone can't shrink the heap
        keepers.append(os.urandom(5_000))
    full = resident()
    blocks.clear()
    return_to_system()
    assert full - resident() > 40 * MB
