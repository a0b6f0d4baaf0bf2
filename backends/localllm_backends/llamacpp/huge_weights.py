"""Move weights from the file mapping into huge pages of this process while no request runs. Linux
only.

llama.cpp repacks some formats. It reads the others (Q8_0, Q6_K, Q4_1 on x86) from the mapped file,
in pages of 4 KiB, so each token touches hundreds of thousands of pages. This module copies used
weights into huge pages and moves the copy to the addresses of the mapping (mremap), which llama.cpp
does not notice. No byte is resident twice: the file's pages return to the system's cache. Unused
weights, such as experts and rows of a table, stay in the file.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from localllm_backends.llamacpp.context import mapped_at

_SYSTEM = Path("/")
_PAGE_BYTES = 4096
_PIECE_BYTES = 4 * 2**20  # 1 to 10 ms of work, the longest delay of a request
_SCAN_BYTES = 256 * 2**20  # bytes to scan per call if all of them stay in the file
_FIRST_INTERVAL_S = 60.0
_MIN_SPARE_RATIO = 2  # required spare memory, as a multiple of the mapped bytes
_MIN_USED_SHARE = 0.9  # minimum share of used small pages in a piece. Less would load unused data.
_PRESENT = 1 << 63  # Documentation/admin-guide/mm/pagemap.rst
_PROT_READ = 1
_PROT_WRITE = 2
_MAP_PRIVATE = 2
_MAP_ANONYMOUS = 0x20
_MADV_HUGEPAGE = 14
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_FAILED = ctypes.c_void_p(-1).value


def huge_page_bytes(root: Path = _SYSTEM) -> int:
    """Return the size of a huge page in bytes; 0 if this process can't have huge pages.

    Returns 0 too if normal pages are larger than 4 KiB (with 64 KiB pages, huge ones have half a
    GB). `root`: root of the file system.
    """
    if sys.platform != "linux" or mmap.PAGESIZE != _PAGE_BYTES:
        return 0
    folder = root / "sys/kernel/mm/transparent_hugepage"
    try:
        if "[never]" in (folder / "enabled").read_text(encoding="ascii"):
            return 0
        return int((folder / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


class HugeWeights:
    """Moves the mapped weights of one model file into huge pages, piece by piece.

    `page_bytes`: size of a huge page (0: move no weights).
    """

    def __init__(
        self, path: Path, page_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._page = huge_page_bytes() if page_bytes is None else page_bytes
        self._path = path
        self._clock = clock
        self._round: Iterator[tuple[int, int]] | None = None
        self._again_s = 0.0
        self._interval_s = _FIRST_INTERVAL_S

    def move(self, spare_bytes: int | None) -> bool:
        """Move one piece if it fits into `spare_bytes` of memory (None: unknown), or search for
        one.

        Returns True if there may be more pieces. Unused pieces are checked again after one minute,
        then after two more, and so on.
        """
        if not self._page or (spare_bytes is not None and spare_bytes < _PIECE_BYTES):
            return False
        if self._round is None:
            if self._clock() < self._again_s:
                return False
            # The system can drop a file's pages when memory is short, but not ours. So there must
            # be ample spare memory.
            mapped_bytes = sum(stop - start for start, stop in mapped_at(self._path))
            ample = spare_bytes is None or spare_bytes >= _MIN_SPARE_RATIO * mapped_bytes
            self._round = self._pieces() if ample else iter(())
        address, n_bytes = next(self._round, (0, 0))
        if not address or (n_bytes and not self._replace(address, n_bytes)):
            self._round = None
            self._again_s = self._clock() + self._interval_s
            self._interval_s = 2 * self._interval_s
            return False
        return True

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield (address, bytes) of aligned pieces whose small pages are in use.

        Yields 0 bytes after scanning many unused pages.
        """
        piece = max(self._page, _PIECE_BYTES)
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for start, stop in mapped_at(self._path):
                first = -(-start // self._page) * self._page
                for at in range(first, stop - piece + 1, piece):
                    used = _in_use(pagemap, at, piece)
                    if used or (at - first) % _SCAN_BYTES == 0:
                        yield at, piece * used

    def _replace(self, address: int, n_bytes: int) -> bool:
        """Replace `n_bytes` of the mapping at `address` by a copy in huge pages.

        Returns False, with the mapping unchanged, if that is impossible.
        """
        libc = _libc()
        writable = _PROT_READ | _PROT_WRITE
        own = _MAP_PRIVATE | _MAP_ANONYMOUS
        buffer_address = libc.mmap(None, n_bytes + self._page, writable, own, -1, 0)
        if buffer_address == _FAILED:
            return False
        # Unmap the parts before and after the aligned huge pages.
        copy = -(-buffer_address // self._page) * self._page
        before = copy - buffer_address
        tail = self._page - before
        if tail:
            libc.munmap(copy + n_bytes, tail)
        if before:
            libc.munmap(buffer_address, before)
        libc.madvise(copy, n_bytes, _MADV_HUGEPAGE)
        ctypes.memmove(copy, address, n_bytes)
        libc.mprotect(copy, n_bytes, _PROT_READ)
        # The kernel unmaps and maps under one lock. A thread that reads there waits, then reads the
        # same bytes.
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        moved = libc.mremap(copy, n_bytes, n_bytes, flags, ctypes.c_void_p(address))
        if moved == _FAILED:
            libc.munmap(copy, n_bytes)
            return False
        return True


def _in_use(pagemap: BinaryIO, address: int, n_bytes: int) -> bool:
    """Return whether most small pages of the `n_bytes` at `address` are present, so were read
    before."""
    pagemap.seek(address // _PAGE_BYTES * 8)
    entries = memoryview(pagemap.read(n_bytes // _PAGE_BYTES * 8)).cast("Q")
    return sum(entry & _PRESENT != 0 for entry in entries) >= _MIN_USED_SHARE * len(entries)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_void_p
    size = ctypes.c_size_t
    number = ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.mprotect.argtypes = [pointer, size, number]
    libc.madvise.argtypes = [pointer, size, number]
    libc.mremap.restype = pointer
    libc.mremap.argtypes = [pointer, size, size, number, pointer]
    return libc
