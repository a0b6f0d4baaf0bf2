"""If KV is in device memory, exporting it costs a round trip for each run of cells. Sequences stay
in the context while there is room. They are exported between requests, with a limited number of
copies at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drive import GREEDY, Outcome, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm_backends.contract import Chunk, LoadSpec, StepResult
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.llamacpp.cells import CellLedger
from models import tiny_gguf
from support.requests import request_for
from support.scripted_backend import TURN, ScriptedBackend

LAYERS = 30


class OnDevice(ScriptedBackend):
    """A backend in which every step's tokens take the next cells, as in llama.cpp. It counts the
    copies that exports make."""

    def __init__(self, n_ctx: int = 8192, n_seq_max: int = 16, *, on_device: bool = True) -> None:
        super().__init__(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=64)
        self.capabilities = replace(self.capabilities, kv_on_device=on_device)
        self._cells: dict[int, list[int]] = {}
        self._next_cell = 0
        self.copies: list[int] = []

    def step(self, chunks: Seq[Chunk]) -> StepResult:
        result = super().step(chunks)
        for chunk in chunks:
            held = self._cells.setdefault(chunk.sequence, [])
            del held[self.length(chunk.sequence) - len(chunk.tokens) :]
            held += range(self._next_cell, self._next_cell + len(chunk.tokens))
            self._next_cell += len(chunk.tokens)
        return result

    def fork(self, source: int, n_tokens: int) -> int:
        target = super().fork(source, n_tokens)
        self._cells[target] = self._cells[source][:n_tokens]
        return target

    def import_range(self, sequence: int, data: bytes | memoryview, start: int, stop: int) -> None:
        super().import_range(sequence, data, start, stop)
        held = self._cells.setdefault(sequence, [])
        held[start:] = range(self._next_cell, self._next_cell + stop - start)
        self._next_cell += stop - start

    def export_runs(self, sequence: int, start: int, stop: int) -> int:
        return 1 + int(np.count_nonzero(np.diff(self._cells[sequence][start:stop]) != 1))

    def export_range(self, sequence: int, start: int, stop: int) -> bytes:
        self.copies.append(2 * LAYERS * self.export_runs(sequence, start, stop))
        return super().export_range(sequence, start, stop)


def prompt(i: int, n: int = 200) -> list[int]:
    return [TURN, 30 + i, *(40 + (i * 31 + k * 7) % 200 for k in range(n)), TURN]


def eight(engine: Engine, n: int = 90) -> Outcome:
    """Generate eight answers concurrently."""
    asked = [
        request_for(f"r{i}", prompt(i), max_tokens=n, sampling=GREEDY, ignore_eos=True)
        for i in range(8)
    ]
    return run(engine, *asked)


def test_sequences_are_copied_between_requests_and_not_during_them() -> None:
    backend = OnDevice()
    engine = Engine(backend, EngineSettings(headroom_bytes=0))
    answers = eight(engine)
    assert len(backend.copies) <= 1, "the pause has begun with the last one's end"
    assert engine.snapshot()["residents"] == 8
    settle(engine)
    engine.check_integrity()
    assert max(backend.copies) <= 64 * 2 * LAYERS, (
        "of tokens decoded together no more than 64 at a time"
    )
    assert len(backend.copies) > 8
    assert engine.snapshot()["residents"] == 8, "they stay while there is room"
    for i in range(8):
        line = [*prompt(i), *answers.tokens[f"r{i}"], TURN]
        end = run(engine, request_for(f"next{i}", line, 4, GREEDY, ignore_eos=True)).finish(
            f"next{i}"
        )
        assert end.usage.cached_tokens >= len(line) - 2


def test_a_prompt_occupies_one_run_of_cells_and_is_copied_in_large_pieces() -> None:
    backend = OnDevice()
    engine = Engine(backend, EngineSettings(headroom_bytes=0))
    run(engine, request_for("a", prompt(1, 2000), 4, GREEDY, ignore_eos=True))
    settle(engine)
    assert len(backend.copies) == 4
    assert sum(backend.copies) <= 5 * 2 * LAYERS


def test_if_cells_run_short_idle_sequences_leave_gradually_during_other_requests() -> None:
    """The cells that a newcomer needs are free by then, so it does not wait for the export of a
    complete sequence."""
    backend = OnDevice(n_ctx=3000)
    engine = Engine(backend, EngineSettings(headroom_bytes=0))
    eight(engine)
    engine.submit(request_for("stream", prompt(9), 300, GREEDY, ignore_eos=True), prompt(9))
    most = 0
    while engine.has_work:
        before = len(backend.copies)
        engine.step()
        engine.check_integrity()
        most = max(most, sum(backend.copies[before:]))
    assert backend.copies
    assert most <= 64 * 2 * LAYERS
    n = len(backend.copies)
    run(engine, request_for("new", prompt(10, 400), 4, GREEDY, ignore_eos=True))
    assert len(backend.copies) <= n + 2
    line = prompt(0)
    assert (
        run(engine, request_for("old", line, 4, GREEDY)).finish("old").usage.cached_tokens
        >= len(line) - 1
    )


def test_on_a_cpu_idle_sequences_are_exported_at_once_and_leave_the_context() -> None:
    backend = OnDevice(on_device=False)
    engine = Engine(backend, EngineSettings(headroom_bytes=0))
    eight(engine)
    assert backend.copies
    settle(engine)
    assert engine.snapshot()["residents"] == 1


def test_closing_exports_what_is_resident(tmp_path: Path) -> None:
    options = EngineSettings(headroom_bytes=0, disk_dir=str(tmp_path), disk_bytes=10**9)
    engine = Engine(OnDevice(), options)
    eight(engine, 20)
    engine.close()
    engine = Engine(OnDevice(), options)
    line = prompt(3)
    assert (
        run(engine, request_for("a", line, 4, GREEDY)).finish("a").usage.cached_tokens
        >= len(line) - 1
    )
    engine.close()


@given(
    steps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), max_size=30)
)
def test_a_run_consists_of_cells_taken_consecutively(steps: list[list[int]]) -> None:
    ledger = CellLedger(200)
    order: dict[int, list[int]] = {i: [] for i in range(4)}
    for i in order:
        ledger.open(i)
    n = 0
    for together in steps:
        for i in together:
            ledger.append(i, 1)
            order[i].append(n)
            n += 1
    for i, taken in order.items():
        runs = sum(b != a + 1 for a, b in itertools.pairwise(taken)) + bool(taken)
        assert ledger.runs(i, 0, len(taken)) == runs


def test_tokens_appended_together_form_one_run_after_earlier_sequences_left() -> None:
    ledger = CellLedger(64)
    for i in range(4):
        ledger.open(i)
    for _ in range(8):
        for i in range(4):
            ledger.append(i, 1)
    for i in range(4):
        ledger.close(i)
    ledger.open(4)
    ledger.append(4, 20)
    assert ledger.runs(4, 0, 20) == 1


def test_llama_cpp_counts_the_runs_of_tokens_decoded_together(tmp_path: Path) -> None:
    path = tiny_gguf.write_llama(tmp_path / "model.gguf")
    backend = llamacpp.load(LoadSpec(str(path), n_ctx=256, n_threads=1))
    a, b = backend.new_sequence(), backend.new_sequence()
    backend.step([Chunk(a, list(range(10, 40)))])
    backend.step([Chunk(b, list(range(10, 40)))])
    for token in range(50, 60):
        backend.step([Chunk(a, [token]), Chunk(b, [token])])
    assert backend.export_runs(a, 0, 30) == 1  # type: ignore[attr-defined]
    assert backend.export_runs(a, 0, 40) == 11  # type: ignore[attr-defined]
    assert not backend.capabilities.kv_on_device, "nothing is offloaded here"
    backend.close()


@pytest.mark.parametrize("n_seq_max", [4, 9])
def test_if_sequences_run_short_the_oldest_idle_one_leaves(n_seq_max: int) -> None:
    backend = OnDevice(n_seq_max=n_seq_max)
    engine = Engine(backend, EngineSettings(headroom_bytes=0))
    for i in range(12):
        run(engine, request_for(f"r{i}", prompt(i), 4, GREEDY, ignore_eos=True))
        engine.check_integrity()
    for i in range(12):
        line = prompt(i)
        end = run(engine, request_for(f"again{i}", line, 4, GREEDY)).finish(f"again{i}")
        assert end.usage.cached_tokens >= len(line) - 1
