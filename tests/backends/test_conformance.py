"""The backend contract, checked for every backend and every kind of memory that we can build."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm_backends import conformance
from localllm_backends.conformance import CHECKS, LOGIT_NOISE, Subject
from localllm_backends.contract import (
    Backend,
    BackendFailure,
    Chunk,
    LoadSpec,
    StepError,
)
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.mlx import backend_type as mlx
from models import tiny_gguf, tiny_mlx, tiny_mtp
from support.scripted_backend import ScriptedBackend, ScriptedResult

N_CTX = 512

SHAPES: dict[str, Callable[[Path], Path] | None] = {
    "scripted": None,
    "scripted-bounded": None,
    "scripted-recurrent": None,
    "scripted-states": None,
    "llamacpp-llama": tiny_gguf.write_llama,
    "llamacpp-sliding": tiny_gguf.write_sliding,
    "llamacpp-hybrid": tiny_gguf.write_hybrid,
    "llamacpp-moe": tiny_gguf.write_moe,
    "llamacpp-mtp+mtp": tiny_mtp.write_mtp,
    "llamacpp-sliding+mtp": tiny_mtp.write_sliding_mtp,
    "llamacpp-hybrid+mtp+rewind": tiny_mtp.write_hybrid_mtp,
    **{
        f"mlx-{name}": write
        for name, write in tiny_mlx.SHAPES.items()
        if not name.startswith("mtp")
    },
    "mlx-llama+q8_0": tiny_mlx.write_llama,
    "mlx-llama+q4_0": tiny_mlx.write_llama,
    "mlx-hybrid+rewind": tiny_mlx.write_hybrid,
    "mlx-recurrent+rewind": tiny_mlx.write_recurrent,
    "mlx-mtp+mtp": tiny_mlx.SHAPES["mtp"],
    "mlx-mtp-hybrid+mtp+rewind": tiny_mlx.SHAPES["mtp-hybrid"],
}
# Settings that differ from the defaults, by the word after the plus sign.
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "q8_0": {"kv_type_k": "q8_0", "kv_type_v": "q8_0"},
    "q4_0": {"kv_type_k": "q4_0", "kv_type_v": "q4_0"},
    "rewind": {"n_rewind": 16},
    "mtp": {"mtp": True},
    "mtp+rewind": {"mtp": True, "n_rewind": 16},
}
NO_MLX = mlx.available()


@pytest.fixture(
    params=[
        pytest.param(
            name,
            marks=[pytest.mark.mlx, pytest.mark.skipif(NO_MLX is not None, reason=str(NO_MLX))],
        )
        if name.startswith("mlx-")
        else name
        for name in SHAPES
    ]
)
def backend(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Callable[[str], Path],
) -> Iterator[Backend]:
    write = SHAPES[request.param]
    made: Backend
    if request.param.startswith("mlx-"):
        name, _, setting = request.param.removeprefix("mlx-").partition("+")
        path = checkpoint(name)
        made = mlx.load(
            LoadSpec(str(path), n_ctx=N_CTX, n_seq_max=4, n_batch=32, **SETTINGS[setting])
        )
    elif write is None:
        shape = request.param.removeprefix("scripted").removeprefix("-")
        made = {
            "": lambda: ScriptedBackend(n_ctx=N_CTX),
            "bounded": lambda: ScriptedBackend(
                n_ctx=N_CTX, rewind="bounded", rewind_tokens=16, segments=False
            ),
            "recurrent": lambda: ScriptedBackend(n_ctx=N_CTX, rewind="none", segments=False),
            "states": lambda: ScriptedBackend(n_ctx=N_CTX, rewind="none", states=True),
        }[shape]()
    else:
        path = tmp_path_factory.getbasetemp() / f"{request.param}.gguf"
        if not path.exists():
            write(path)
        _, _, setting = request.param.partition("+")
        made = llamacpp.load(
            LoadSpec(str(path), n_ctx=N_CTX, n_seq_max=4, n_batch=32, **SETTINGS[setting])
        )
    yield made
    made.check_integrity()
    made.close()


def line(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 250, n)]


def feed(backend: Backend, sequence: int, tokens: list[int]) -> np.ndarray:
    """Append tokens in batches and return the logits after the last one."""
    return Subject(backend).feed(sequence, tokens)


def assert_same(a: np.ndarray, b: np.ndarray) -> None:
    assert np.abs(a - b).max() <= LOGIT_NOISE * max(1.0, float(np.abs(a).max()))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_backends_keep_the_contract(backend: Backend, check: conformance.Check) -> None:
    free = backend.cells_free()
    subject = Subject(backend)
    try:
        subject.examine(check)
    except conformance.NotApplicable as e:
        pytest.skip(str(e))
    assert subject.worst <= LOGIT_NOISE
    assert backend.cells_free() == free, "a check leaves the backend as it found it"


class LostAfter(ScriptedBackend):
    """A device that is lost after that many steps."""

    def __init__(self, n_steps: int) -> None:
        super().__init__(n_ctx=N_CTX)
        self.left = n_steps

    def step(self, chunks: Sequence[Chunk]) -> ScriptedResult:
        self.left -= 1
        if self.left < 0:
            raise StepError("the device is lost")
        return super().step(chunks)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_failed_check_drops_its_sequences(check: conformance.Check) -> None:
    """The device may be lost in any step of the check."""
    for n_steps in range(200):
        backend = LostAfter(n_steps)
        with contextlib.suppress(BackendFailure, conformance.NotApplicable):
            Subject(backend).examine(check)
        assert not backend.lines
        backend.check_integrity()
        if backend.left >= 0:
            return
    pytest.fail("the check never ended")


def test_imported_kv_and_state_continue_where_the_state_was_exported(backend: Backend) -> None:
    if not backend.capabilities.states:
        pytest.skip("this memory keeps no state apart from its KV")
    tokens = line(120)
    source = backend.new_sequence()
    feed(backend, source, tokens[:70])
    state = backend.export_state(source)
    assert len(state) == backend.state_bytes(source)
    feed(backend, source, tokens[70:])
    kv = [backend.export_range(source, 0, 25), backend.export_range(source, 25, 90)]
    more = line(9, 5)
    fresh = backend.new_sequence()
    expected = feed(backend, fresh, [*tokens[:70], *more]).copy()
    backend.drop(fresh)

    joined = backend.new_sequence()
    backend.import_range(joined, kv[0], 0, 25)
    feed(backend, source, line(5, 2))
    backend.import_range(joined, kv[1], 25, 70)
    backend.import_state(joined, state, 70)
    assert backend.length(joined) == 70
    free = backend.cells_free()
    forked = backend.fork_state(source, state, 70)
    assert backend.length(forked) == 70
    assert free - backend.cells_free() == (0 if backend.capabilities.shares_cells else 70)
    for sequence in (joined, forked):
        assert_same(expected, feed(backend, sequence, more))
    backend.import_state(source, state, 70)
    assert backend.length(source) == 70
    assert_same(expected, feed(backend, source, more))
    backend.check_integrity()


def test_the_state_of_another_place_is_refused(backend: Backend) -> None:
    if not backend.capabilities.states:
        pytest.skip("this memory keeps no state apart from its KV")
    source = backend.new_sequence()
    feed(backend, source, line(40))
    state = backend.export_state(source)
    feed(backend, source, line(9, 5))
    for bad, n_tokens in (
        (state, 45),
        (b"", 40),
        (b"not a state at all, but long enough", 40),
        (state[:-9], 40),
    ):
        with pytest.raises(BackendFailure):
            backend.fork_state(source, bad, n_tokens)
    backend.fork_state(source, state, 40)
    backend.check_integrity()


@pytest.mark.parametrize("name", ["llamacpp-sliding", "llamacpp-hybrid"])
def test_llama_cpp_stores_states_separately_from_kv(name: str, tmp_path: Path) -> None:
    """Otherwise every snapshot would contain all data. A failure means that this build stores
    sequences differently."""
    write = SHAPES[name]
    assert write is not None
    loaded = llamacpp.load(
        LoadSpec(str(write(tmp_path / "tiny.gguf")), n_ctx=N_CTX, n_seq_max=4, n_batch=32)
    )
    assert loaded.capabilities.states
    loaded.close()


OPERATIONS: dict[str, Callable[[Backend, int], object]] = {
    "new_sequence": lambda backend, held: backend.new_sequence(),
    "fork": lambda backend, held: backend.fork(held, 5),
    "truncate": lambda backend, held: backend.truncate(held, 0),
    "drop": lambda backend, held: backend.drop(held),
    "step": lambda backend, held: backend.step([Chunk(held, [7])]),
    "draft": lambda backend, held: backend.draft([(held, 7, 1)]),
    "export_range": lambda backend, held: backend.export_range(held, 0, 5),
    "import_range": lambda backend, held: backend.import_range(held, b"", 5, 6),
    "export_state": lambda backend, held: backend.export_state(held),
    "import_state": lambda backend, held: backend.import_state(held, b"", 5),
    "fork_state": lambda backend, held: backend.fork_state(held, b"", 5),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["llamacpp", "mlx"])
def test_a_call_from_another_thread_is_refused_and_changes_nothing(
    name: str, operation: str, tiny_model: Path, load: Callable[..., Any]
) -> None:
    if name == "mlx" and NO_MLX is not None:
        pytest.skip(NO_MLX)
    backend = load() if name == "mlx" else llamacpp.load(LoadSpec(str(tiny_model), n_ctx=256))
    held = backend.new_sequence()
    feed(backend, held, line(5))
    free = backend.cells_free()
    raised: list[BackendFailure] = []

    def call() -> None:
        try:
            OPERATIONS[operation](backend, held)
        except BackendFailure as e:
            raised.append(e)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert [str(e) for e in raised] == [
        f"`{operation}` was called from another thread: "
        "a backend belongs to the thread that loaded it"
    ]
    assert backend.length(held) == 5
    assert backend.cells_free() == free
    backend.check_integrity()
    if name == "llamacpp":
        backend.close()


def test_text_can_be_tokenised_in_any_thread(tiny_model: Path, load: Callable[..., Any]) -> None:
    backends = [llamacpp.load(LoadSpec(str(tiny_model), n_ctx=256))]
    if NO_MLX is None:
        backends.append(load())
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.extend(b.tokenize("hello") for b in backends))
    thread.start()
    thread.join()
    assert found == [b.tokenize("hello") for b in backends]
    backends[0].close()
