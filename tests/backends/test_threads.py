"""The number of threads follows the available cores: a container's quota, and the fast cores of a
hybrid CPU."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from localllm_backends.llamacpp.threads import cpu_quota, lower_priority, usable_cores


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        # A container: its own group is the root, whatever path the host gives it.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {"proc/self/cgroup": "0::/../docker/abc\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"},
            4.0,
        ),
        # A service: the tightest group above it counts.
        (
            {
                "proc/self/cgroup": "0::/system.slice/localllm.service\n",
                "sys/fs/cgroup/system.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/system.slice/localllm.service/cpu.max": "max 100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box\n2:memory:/box\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_is_that_of_the_tightest_group(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(system(tmp_path, files)) == quota


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight physical cores, sixteen threads."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("quota", "threads"), [("max", 8), ("250000", 3), ("200000", 2), ("20000", 1), ("3200000", 8)]
)
def test_the_thread_count_is_within_the_cpu_quota(tmp_path: Path, quota: str, threads: int) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    assert usable_cores(system(tmp_path, files)) == threads


@pytest.mark.usefixtures("eight")
def test_slow_cores_of_a_hybrid_processor_are_not_used(tmp_path: Path) -> None:
    """Four fast cores of two threads each, eight slow ones."""
    siblings = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n & ~1}-{n | 1}\n"
        for n in range(8)
    }
    assert usable_cores(system(tmp_path, {"sys/devices/cpu_core/cpus": "0-7\n", **siblings})) == 4


@pytest.mark.usefixtures("eight")
def test_a_process_pinned_to_slow_cores_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 9, 10}, raising=False)
    assert usable_cores(system(tmp_path, {"sys/devices/cpu_core/cpus": "0-7\n"})) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts priority by thread")
@pytest.mark.parametrize(
    ("load", "policy", "nice"), [(0.0, "SCHED_IDLE", None), (1e3, "SCHED_OTHER", 10)]
)
def test_lowering_priority_affects_one_thread_and_avoids_starvation(
    load: float, policy: str, nice: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    seen: list[tuple[int, int]] = []

    def here() -> tuple[int, int]:
        me = threading.get_native_id()
        return os.sched_getscheduler(me), os.getpriority(os.PRIO_PROCESS, me)

    def one() -> None:
        lower_priority()
        seen.append(here())

    before = here()
    thread = threading.Thread(target=one)
    thread.start()
    thread.join()
    # The complete test run may have a lower priority, too.
    assert seen == [(getattr(os, policy), before[1] if nice is None else nice)]
    assert here() == before


def test_this_machine_has_at_least_one_usable_core() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
