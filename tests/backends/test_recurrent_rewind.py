"""A recurrent state can be rewound within its last step, but no further: older snapshots are stale
and are refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from localllm_backends.contract import Backend, CannotRewindError, Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type
from models import tiny_gguf

REWIND = 6


def load(path: Path, n_rewind: int = 0) -> Backend:
    return backend_type.load(
        LoadSpec(str(path), n_ctx=256, n_seq_max=3, n_batch=64, n_rewind=n_rewind)
    )


def test_random_rollbacks_restore_the_state_of_the_remaining_tokens(tmp_path: Path) -> None:
    path = tiny_gguf.write_hybrid(tmp_path / "m.gguf")
    backend, fresh = load(path, REWIND), load(path)
    rng = random.Random(4)
    line: list[int] = [rng.randrange(3, 250) for _ in range(20)]
    sequence = backend.new_sequence()
    backend.step([Chunk(sequence, line)])
    for _ in range(15):
        drafted = [rng.randrange(3, 250) for _ in range(rng.randrange(1, REWIND + 2))]
        rows = backend.step([Chunk(sequence, drafted, len(drafted))]).logits(0).copy()
        check = fresh.new_sequence()
        expected = fresh.step([Chunk(check, [*line, *drafted], len(drafted))]).logits(0)
        assert np.allclose(rows, expected, rtol=1e-7, atol=0.05 * float(expected.std()))
        fresh.drop(check)
        keep = rng.randrange(1, len(drafted) + 1)
        backend.truncate(sequence, len(line) + keep)
        line += drafted[:keep]


def test_a_rollback_beyond_the_last_step_is_refused(tmp_path: Path) -> None:
    backend = load(tiny_gguf.write_hybrid(tmp_path / "m.gguf"), REWIND)
    sequence = backend.new_sequence()
    backend.step([Chunk(sequence, list(range(10, 20)))])
    backend.step([Chunk(sequence, [5])])
    with pytest.raises(CannotRewindError):
        backend.truncate(sequence, 8)
    assert backend.length(sequence) == 11
    backend.step([Chunk(sequence, [6, 7, 8])])
    backend.truncate(sequence, 12)
    with pytest.raises(CannotRewindError):
        backend.truncate(sequence, 11)
    # A state with a pending rollback can't be shared.
    with pytest.raises(CannotRewindError):
        backend.fork(sequence, 12)
    backend.step([Chunk(sequence, [9])])
    assert backend.length(backend.fork(sequence, 13)) == 13


def test_sequences_of_unequal_lengths_roll_back_together(tmp_path: Path) -> None:
    path = tiny_gguf.write_hybrid(tmp_path / "m.gguf")
    backend, fresh = load(path, REWIND), load(path)
    rng = random.Random(3)
    lines: dict[int, list[int]] = {backend.new_sequence(): [] for _ in range(3)}
    for _ in range(8):
        chunks = []
        for sequence, line in lines.items():
            n = rng.randrange(10, 20) if not line else rng.randrange(1, REWIND + 2)
            chunks.append(Chunk(sequence, [rng.randrange(3, 250) for _ in range(n)]))
        result = backend.step(chunks)
        for i, chunk in enumerate(chunks):
            line = lines[chunk.sequence]
            line += chunk.tokens
            check = fresh.new_sequence()
            row = fresh.step([Chunk(check, line)]).logits(0)[-1]
            assert np.allclose(result.logits(i)[-1], row, rtol=1e-7, atol=0.05 * float(row.std()))
            fresh.drop(check)
            back = rng.randrange(0, min(len(chunk.tokens), REWIND + 1))
            if back:
                backend.truncate(chunk.sequence, len(line) - back)
                del line[-back:]
