"""Weights that llama.cpp reads from the mapped file move into huge pages: the same bytes at the
same addresses."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm_backends.contract import Chunk, LoadSpec, Placement
from localllm_backends.llamacpp import backend_type
from localllm_backends.llamacpp.context import mapped_at
from localllm_backends.llamacpp.huge_weights import HugeWeights, huge_page_bytes

HUGE_BYTES = 2 * 2**20
FILE_BYTES = 24 * 2**20
AMPLE = 10**12

needs_huge_pages = pytest.mark.skipif(
    huge_page_bytes() != HUGE_BYTES, reason="this system has no huge pages of 2 MiB"
)


def system(root: Path, enabled: str, n_bytes: str = "2097152\n") -> Path:
    folder = root / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text(enabled, encoding="ascii")
    (folder / "hpage_pmd_size").write_text(n_bytes, encoding="ascii")
    return root


@pytest.mark.skipif(
    sys.platform != "linux" or mmap.PAGESIZE != 4096,
    reason="huge pages are asked of Linux with pages of 4 KiB",
)
@pytest.mark.parametrize(
    ("enabled", "expected"),
    [
        ("always [madvise] never\n", HUGE_BYTES),
        ("[always] madvise never\n", HUGE_BYTES),
        ("always madvise [never]\n", 0),
    ],
)
def test_a_system_reports_whether_it_offers_huge_pages(
    tmp_path: Path, enabled: str, expected: int
) -> None:
    assert huge_page_bytes(system(tmp_path, enabled)) == expected


def test_on_a_system_without_huge_pages_no_weights_move(tmp_path: Path) -> None:
    assert huge_page_bytes(tmp_path) == 0
    assert not HugeWeights(tmp_path / "model.gguf", page_bytes=0).move(AMPLE)


@contextmanager
def mapped(path: Path, *, read: bool) -> Iterator[np.ndarray]:
    """Map a file of random bytes as llama.cpp does: shared and read-only. With `read`, its pages
    are mapped in."""
    path.write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
    with path.open("rb") as f:
        view = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
        data = np.frombuffer(view, dtype=np.uint8)
        if read:
            int(data.sum())
        yield data
        del data


def moved_bytes(path: Path) -> int:
    """Return how many bytes of the file are no longer mapped from it."""
    return FILE_BYTES - sum(stop - start for start, stop in mapped_at(path))


@needs_huge_pages
def test_weights_in_use_move_to_huge_pages_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with mapped(path, read=True) as data:
        at, before = data.ctypes.data, data.copy()
        weights = HugeWeights(path)
        while weights.move(AMPLE):
            pass
        assert FILE_BYTES - 2 * HUGE_BYTES <= moved_bytes(path) <= FILE_BYTES
        assert data.ctypes.data == at
        np.testing.assert_array_equal(data, before)
        assert not weights.move(AMPLE), "what has moved is moved no second time"


@needs_huge_pages
def test_unread_weights_stay_in_the_file_until_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with mapped(path, read=False) as data:
        now = [0.0]
        weights = HugeWeights(path, clock=lambda: now[0])
        while weights.move(AMPLE):
            pass
        assert moved_bytes(path) == 0
        int(data.sum())
        assert not weights.move(AMPLE), "it has only just looked"
        now[0] = 3600.0
        while weights.move(AMPLE):
            pass
        assert moved_bytes(path) >= FILE_BYTES - 2 * HUGE_BYTES


@needs_huge_pages
def test_weights_do_not_move_if_memory_is_short(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with mapped(path, read=True):
        now = [0.0]
        weights = HugeWeights(path, clock=lambda: now[0])
        for spare_bytes in (2**20, FILE_BYTES, 2 * FILE_BYTES - 1):
            while weights.move(spare_bytes):
                pass
            now[0] += 3600.0
        assert moved_bytes(path) == 0
        while weights.move(2 * FILE_BYTES):
            pass
        assert moved_bytes(path)


@needs_huge_pages
def test_concurrent_readers_see_unchanged_weights_during_a_move(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with mapped(path, read=True) as data:
        expected, done, seen = int(data[::4096].astype(np.int64).sum()), threading.Event(), set()

        def read() -> None:
            while not done.is_set():
                seen.add(int(data[::4096].astype(np.int64).sum()))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        weights = HugeWeights(path)
        while weights.move(AMPLE):
            pass
        done.set()
        for reader in readers:
            reader.join()
        assert moved_bytes(path)
        assert seen == {expected}


@needs_huge_pages
def test_weights_that_moved_during_idle_time_do_not_change_answers(smollm2: Path) -> None:
    """SmolLM2 in Q4_1: no processor's kernels repack this type, so nearly all of the file moves.
    (Layers on a GPU would be in its memory, so none are offloaded.)"""
    backend = backend_type.load(
        LoadSpec(str(smollm2), n_ctx=512, placement=Placement(gpu_layers=0))
    )

    def logits() -> np.ndarray:
        sequence = backend.new_sequence()
        rows = backend.step([Chunk(sequence, list(range(100, 140)), outputs=1)]).rows[0].copy()
        backend.drop(sequence)
        return rows

    before, in_file = logits(), sum(stop - start for start, stop in mapped_at(smollm2))
    engine = Engine(backend, EngineSettings(headroom_bytes=0), available=lambda: AMPLE)
    while engine.idle():
        pass
    left = sum(stop - start for start, stop in mapped_at(smollm2))
    after = logits()
    engine.close()
    np.testing.assert_array_equal(before, after)
    assert in_file > 50e6
    assert left < 0.2 * in_file
    assert not mapped_at(smollm2)
