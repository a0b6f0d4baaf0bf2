"""What makes something a backend: the contract, run against every backend and every memory shape we can build."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm_backends.contract import (
    Backend,
    BackendFailure,
    CannotRewindError,
    Chunk,
    LoadSpec,
    NoCellsError,
)
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.mlx import backend_type as mlx
from models import tiny_gguf, tiny_mlx, tiny_mtp
from support.scripted_backend import ScriptedBackend

# Kernels for different batch shapes round differently; random weights of this size stay well inside this.
LOGIT_NOISE = 2e-2

N_CTX = 512

SHAPES: dict[str, Callable[[Path], Path] | None] = {
    "scripted": None,
    "scripted-bounded": None,
    "scripted-recurrent": None,
    "llamacpp-llama": tiny_gguf.write_llama,
    "llamacpp-sliding": tiny_gguf.write_sliding,
    "llamacpp-hybrid": tiny_gguf.write_hybrid,
    "llamacpp-moe": tiny_gguf.write_moe,
    "llamacpp-mtp+mtp": tiny_mtp.write_mtp,
    "llamacpp-sliding+mtp": tiny_mtp.write_sliding_mtp,
    "llamacpp-hybrid+mtp+rewind": tiny_mtp.write_hybrid_mtp,
    **{f"mlx-{name}": write for name, write in tiny_mlx.SHAPES.items()},
    "mlx-llama+q8_0": tiny_mlx.write_llama,
    "mlx-llama+q4_0": tiny_mlx.write_llama,
    "mlx-hybrid+rewind": tiny_mlx.write_hybrid,
    "mlx-recurrent+rewind": tiny_mlx.write_recurrent,
}
# What is loaded otherwise than by default, by the word after the plus sign.
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "q8_0": {"kv_type_k": "q8_0", "kv_type_v": "q8_0"},
    "q4_0": {"kv_type_k": "q4_0", "kv_type_v": "q4_0"},
    "rewind": {"n_rewind": 16},
    "mtp": {"mtp": True},
    "mtp+rewind": {"mtp": True, "n_rewind": 16},
}
NO_MLX = mlx.available()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny MLX checkpoints by the name of their shape, each written once."""
    root = tmp_path_factory.mktemp("mlx")

    def written(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else tiny_mlx.SHAPES[name](folder)

    return written


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.mlx, pytest.mark.skipif(NO_MLX is not None, reason=str(NO_MLX))])
        if name.startswith("mlx-")
        else name
        for name in SHAPES
    ]
)
def backend(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: Callable[[str], Path],
) -> Iterator[Backend]:
    write = SHAPES[request.param]
    made: Backend
    if request.param.startswith("mlx-"):
        name, _, setting = request.param.removeprefix("mlx-").partition("+")
        path = checkpoints(name)
        made = mlx.load(LoadSpec(str(path), n_ctx=N_CTX, n_seq_max=4, n_batch=32, **SETTINGS[setting]))
    elif write is None:
        shape = request.param.removeprefix("scripted").removeprefix("-")
        made = {
            "": lambda: ScriptedBackend(n_ctx=N_CTX),
            "bounded": lambda: ScriptedBackend(n_ctx=N_CTX, rewind="bounded", rewind_tokens=16, segments=False),
            "recurrent": lambda: ScriptedBackend(n_ctx=N_CTX, rewind="none", segments=False),
        }[shape]()
    else:
        path = write(tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf")
        _, _, setting = request.param.partition("+")
        made = llamacpp.load(LoadSpec(str(path), n_ctx=N_CTX, n_seq_max=4, n_batch=32, **SETTINGS[setting]))
    yield made
    made.check_integrity()
    made.close()


def line(n: int, seed: int = 0) -> list[int]:
    """`n` ordinary tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, 250, n)]


def feed(backend: Backend, sequence: int, tokens: list[int]) -> np.ndarray:
    """Append tokens in batches; the logits after the last."""
    for i in range(0, len(tokens), backend.info.n_batch):
        part = tokens[i : i + backend.info.n_batch]
        result = backend.step([Chunk(sequence, part, outputs=1)])
    return result.logits(0)[-1].copy()


def assert_same(a: np.ndarray, b: np.ndarray) -> None:
    assert np.abs(a - b).max() <= LOGIT_NOISE * max(1.0, float(np.abs(a).max()))


def test_a_step_appends_and_counts(backend: Backend) -> None:
    free = backend.cells_free()
    sequence = backend.new_sequence()
    feed(backend, sequence, line(40))
    assert backend.length(sequence) == 40
    assert backend.cells_free() == free - 40
    backend.drop(sequence)
    assert backend.cells_free() == free


def test_logits_are_the_same_however_the_prompt_is_cut(backend: Backend) -> None:
    tokens = line(60)
    whole, pieces = backend.new_sequence(), backend.new_sequence()
    expected = feed(backend, whole, tokens)
    for token in tokens[:-1]:
        backend.step([Chunk(pieces, [token], outputs=0)])
    assert_same(expected, backend.step([Chunk(pieces, tokens[-1:])]).logits(0)[0])


def test_one_step_serves_several_sequences(backend: Backend) -> None:
    a, b = line(20, 1), line(9, 2)
    alone = []
    for tokens in (a, b):
        sequence = backend.new_sequence()
        alone.append(feed(backend, sequence, tokens))
        backend.drop(sequence)
    first, second = backend.new_sequence(), backend.new_sequence()
    result = backend.step([Chunk(first, a), Chunk(second, b, outputs=1)])
    assert_same(alone[0], result.logits(0)[0])
    assert_same(alone[1], result.logits(1)[0])


def test_several_outputs_come_in_order_and_argmax_agrees(backend: Backend) -> None:
    tokens = line(12)
    sequence = backend.new_sequence()
    result = backend.step([Chunk(sequence, tokens, outputs=5)])
    rows = result.logits(0)
    assert rows.shape == (5, backend.info.n_vocab)
    assert result.argmax(0) == [int(r.argmax()) for r in rows]
    rows = rows.copy()  # a result is good until the next step
    again = backend.new_sequence()
    backend.step([Chunk(again, tokens[:-5], outputs=0)])
    for i in range(5):
        assert_same(rows[i], backend.step([Chunk(again, [tokens[len(tokens) - 5 + i]])]).logits(0)[0])


def test_no_outputs_means_no_rows(backend: Backend) -> None:
    result = backend.step([Chunk(backend.new_sequence(), line(5), outputs=0)])
    assert result.argmax(0) == []
    assert len(result.logits(0)) == 0


def test_a_fork_at_the_end_continues_independently(backend: Backend) -> None:
    tokens = line(30)
    source = backend.new_sequence()
    feed(backend, source, tokens)
    free = backend.cells_free()
    other = backend.fork(source, 30)
    assert free - backend.cells_free() == (0 if backend.capabilities.shares_cells else 30)
    result = backend.step([Chunk(source, [5]), Chunk(other, [7])])
    rows = [result.logits(i)[0].copy() for i in range(2)]
    for tail, row in zip((5, 7), rows, strict=True):
        fresh = backend.new_sequence()
        assert_same(feed(backend, fresh, [*tokens, tail]), row)
        backend.drop(fresh)
    backend.drop(source)
    assert backend.length(other) == 31
    feed(backend, other, line(3, 5))


def test_rewind_is_what_the_capabilities_say(backend: Backend) -> None:
    tokens = line(24)
    sequence = backend.new_sequence()
    feed(backend, sequence, tokens)
    capabilities = backend.capabilities
    if capabilities.rewind == "none":
        with pytest.raises(CannotRewindError):
            backend.truncate(sequence, 20)
        assert backend.length(sequence) == 24
    else:
        back = 6 if capabilities.rewind == "any" else min(6, capabilities.rewind_tokens)
        backend.truncate(sequence, 24 - back)
        assert backend.length(sequence) == 24 - back
        fresh = backend.new_sequence()
        other = line(4, 9)
        assert_same(feed(backend, fresh, tokens[: 24 - back] + other), feed(backend, sequence, other))
    backend.truncate(sequence, 0)
    assert backend.length(sequence) == 0


def test_rejected_draft_tokens_leave_no_trace(backend: Backend) -> None:
    capabilities = backend.capabilities
    most = 8 if capabilities.rewind == "any" else min(8, capabilities.rewind_tokens)
    if not most:
        pytest.skip("this memory can't take tokens back")
    tokens = line(90)
    sequence = backend.new_sequence()
    for start in range(0, 90, 10):
        backend.step([Chunk(sequence, [*tokens[start : start + 10], *line(most, start)], outputs=1 + most)])
        backend.truncate(sequence, start + 10)
    fresh = backend.new_sequence()
    assert_same(feed(backend, fresh, [*tokens, 11]), feed(backend, sequence, [11]))


def test_export_and_import_give_the_same_continuation(backend: Backend) -> None:
    tokens = line(50)
    source = backend.new_sequence()
    feed(backend, source, tokens)
    copy = backend.new_sequence()
    backend.import_range(copy, backend.export_range(source, 0, 50), 0, 50)
    assert backend.length(copy) == 50
    a = backend.step([Chunk(source, [9])]).logits(0)[0].copy()
    assert_same(a, backend.step([Chunk(copy, [9])]).logits(0)[0])


def test_segments_can_be_joined_and_clipped(backend: Backend) -> None:
    if not backend.capabilities.segments:
        pytest.skip("this memory can't be cut into segments")
    tokens = line(60)
    source = backend.new_sequence()
    expected = feed(backend, source, tokens)
    blocks = [backend.export_range(source, 0, 25), backend.export_range(source, 25, 60)]
    joined = backend.new_sequence()
    backend.import_range(joined, blocks[0], 0, 25)
    backend.import_range(joined, blocks[1], 25, 59)
    assert_same(expected, feed(backend, joined, tokens[59:]))


def test_foreign_bytes_are_refused_and_append_nothing(backend: Backend) -> None:
    source = backend.new_sequence()
    feed(backend, source, line(20))
    good = backend.export_range(source, 0, 20)
    target = backend.new_sequence()
    free = backend.cells_free()
    for bad in (b"", b"x", b"not a block of KV at all, but long enough", good[: len(good) // 2]):
        with pytest.raises(BackendFailure):
            backend.import_range(target, bad, 0, 20)
        assert backend.length(target) == 0
        assert backend.cells_free() == free
    backend.import_range(target, good, 0, 20)


def test_running_out_of_cells_is_said_and_changes_nothing(backend: Backend) -> None:
    a, b = backend.new_sequence(), backend.new_sequence()
    feed(backend, a, line(backend.info.n_ctx - 10))
    free = backend.cells_free()
    with pytest.raises(NoCellsError):
        backend.step([Chunk(b, line(free + 1))])
    assert backend.length(b) == 0
    assert backend.cells_free() == free
    backend.drop(a)
    feed(backend, b, line(30))


def test_running_out_of_sequences_is_said(backend: Backend) -> None:
    held = [backend.new_sequence() for _ in range(backend.info.n_seq_max)]
    assert len(set(held)) == len(held)
    with pytest.raises(NoCellsError):
        backend.new_sequence()
    backend.drop(held.pop())
    backend.new_sequence()


def test_a_step_that_is_too_large_or_empty_is_refused(backend: Backend) -> None:
    sequence = backend.new_sequence()
    with pytest.raises(BackendFailure):
        backend.step([Chunk(sequence, line(backend.info.n_batch + 1), outputs=0)])
    with pytest.raises(BackendFailure):
        backend.step([Chunk(sequence, [])])
    assert backend.length(sequence) == 0


def test_text_survives_tokens(backend: Backend) -> None:
    text = "Grüße, 世界! \n\t{x}"
    tokens = backend.tokenize(text, special=False)
    assert backend.detokenize(tokens).strip() == text.strip()
    assert b"".join(backend.token_bytes(t) for t in tokens).decode().strip() == text.strip()
    with pytest.raises(BackendFailure):
        backend.token_bytes(backend.info.n_vocab)


def test_llamacpp_belongs_to_the_thread_that_loaded_it(tiny_model: Path) -> None:
    backend = llamacpp.load(LoadSpec(str(tiny_model), n_ctx=256))
    seen: list[BaseException] = []

    def use() -> None:
        try:
            backend.new_sequence()
        except BackendFailure as e:
            seen.append(e)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert "thread" in str(seen[0])
    backend.close()
