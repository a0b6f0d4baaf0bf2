"""Forks of one long sequence fit into a sliding-window cache: cells before the window are reused,
however many sequences held them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localllm_backends.contract import Backend, Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from models import tiny_gguf

SPEC = {"n_ctx": 2048, "n_seq_max": 4, "n_batch": 64, "n_threads": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write_sliding(tmp_path_factory.mktemp("model") / "sliding.gguf")


@pytest.fixture
def backend(path: Path) -> Iterator[Backend]:
    loaded = llamacpp.load(LoadSpec(str(path), **SPEC))  # type: ignore[arg-type]
    yield loaded
    loaded.check_integrity()
    loaded.close()


def read(backend: Backend, sequence: int, tokens: list[int]) -> np.ndarray:
    """Append `tokens` and return the logits after them."""
    for i in range(0, len(tokens), 64):
        result = backend.step([Chunk(sequence, tokens[i : i + 64])])
    return result.logits(0)[-1].copy()


def words(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(n)]


@pytest.mark.parametrize("together", [False, True])
def test_forks_of_a_long_sequence_continue_as_long_as_there_are_cells(
    backend: Backend, together: bool
) -> None:
    base, line = backend.new_sequence(), words(0, 400)
    read(backend, base, line)
    forks = [base, *(backend.fork(base, 400) for _ in range(3))]
    lines = {f: list(line) for f in forks}
    for turn in range(8):
        new = {f: words(100 * turn + f, 30) for f in forks}
        if together:
            for i in range(0, 30, 15):
                backend.step([Chunk(f, new[f][i : i + 15]) for f in forks])
        else:
            for f in forks:
                read(backend, f, new[f])
        for f in forks:
            lines[f] += new[f]
    logits = {f: read(backend, f, [5]) for f in forks}
    for f in forks:
        backend.drop(f)
    for f in forks[:2]:
        alone = backend.new_sequence()
        expected = read(backend, alone, [*lines[f], 5])
        assert np.abs(expected - logits[f]).max() < 1e-2 * expected.std(), (
            "the windows are the right ones"
        )
        backend.drop(alone)


def test_a_state_is_restored_although_forks_hold_old_windows(backend: Backend) -> None:
    base, line = backend.new_sequence(), words(1, 300)
    read(backend, base, line)
    state = backend.export_state(base)  # type: ignore[attr-defined]
    expected = read(backend, base, [7])
    forks = [backend.fork(base, 301) for _ in range(2)]
    for f in [base, *forks]:
        read(backend, f, words(f, 50))
    back = backend.fork_state(base, state, 300)  # type: ignore[attr-defined]
    assert np.abs(read(backend, back, [7]) - expected).max() < 1e-2 * expected.std()
