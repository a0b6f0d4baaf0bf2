"""A worker's memory on Linux: its computation buffers use pages of 2 MiB if they are offered, and
freed blocks of KV go back to the system."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.pipe import worker_environment
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_huge_pages = pytest.mark.skipif(
    not MODES.exists()
    or "[never]" in MODES.read_text(encoding="utf-8")
    or os.sysconf("SC_PAGE_SIZE") != 4096,
    reason="this system gives nobody huge pages, or its usual ones aren't of 4 KiB",
)


@needs_huge_pages
def test_the_kv_of_a_worker_asks_for_huge_pages(few_layers: Path) -> None:
    """In /proc/PID/smaps, anonymous mappings larger than a few MiB carry the flag `hg`."""

    async def story() -> list[str]:
        supervisor = Supervisor(WorkerOptions(LoadSpec(str(few_layers), n_ctx=8192)))
        try:
            engine = await supervisor.engine()
            return Path(f"/proc/{engine.pid}/smaps").read_text(encoding="utf-8").splitlines()
        finally:
            await supervisor.close()

    asked_bytes, is_anonymous = 0, False
    size_bytes = 0
    for line in asyncio.run(story()):
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_anonymous = len(line.split()) == 5
        elif line.startswith("Size:"):
            size_bytes = 1024 * int(line.split()[1])
        elif line.startswith("VmFlags:") and is_anonymous and "hg" in line.split():
            asked_bytes += size_bytes
    assert asked_bytes > 8 * 2**20


def test_user_glibc_tunables_stay_and_64_kib_pages_need_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096}.get, raising=False)
    assert worker_environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 65536}.get, raising=False)
    assert "GLIBC_TUNABLES" not in worker_environment()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096}.get, raising=False)
    assert worker_environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=1"


# Blocks of 8 MiB are freed after a larger one, with one of 1 MiB at the end of the heap.
FREES_BLOCKS = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def block(size):
    at = libc.malloc(size)
    ctypes.memset(at, 1, size)
    return at
libc.free(block(24 * 2**20))
blocks = [block(8 * 2**20) for _ in range(8)]
last = block(2**20)
for each in blocks:
    libc.free(each)
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) for line in status if line.startswith("VmRSS")))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_blocks_of_a_worker_go_back_to_the_system() -> None:
    def resident_kib(environment: dict[str, str]) -> int:
        command = [sys.executable, "-c", FREES_BLOCKS]
        return int(subprocess.check_output(command, env=environment))

    usual = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    if resident_kib(usual) < 64 * 2**10:
        pytest.skip("this C library returns freed blocks by itself")
    assert resident_kib({**worker_environment(), **usual}) < 32 * 2**10
