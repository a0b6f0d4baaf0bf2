"""Repacked weights and weights as stored in the file: the same model, however it is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from localllm_backends.contract import Backend, Chunk, LoadSpec, Placement
from localllm_backends.llamacpp import backend_type
from models import tiny_gguf

PROMPT = [5 + (7 * i) % 400 for i in range(96)]
# Rounding differences of two kernels, as a share of a row's spread, stay well below this. Another
# model's row differs by 1.4.
NEAR = 0.1
Q4_K_M = 15  # llama.h: enum llama_ftype


@pytest.fixture(scope="module")
def q4_k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose matrices llama.cpp itself quantised to Q4_K."""
    folder = tmp_path_factory.mktemp("q4_k")
    plain = tiny_gguf.write_llama(folder / "plain.gguf", layers=4, e=256)
    path = folder / "q4_k.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = Q4_K_M
    assert (
        llama_cpp.llama_model_quantize(
            str(plain).encode(), str(path).encode(), ctypes.byref(params)
        )
        == 0
    )
    return path


@pytest.fixture
def both(q4_k: Path) -> Iterator[tuple[Backend, Backend]]:
    """The model in llama.cpp's default layout, and as stored."""
    made = [
        backend_type.load(
            LoadSpec(
                str(q4_k), n_ctx=512, n_seq_max=4, n_threads=1, placement=Placement(layout=layout)
            )
        )
        for layout in ("auto", "stored")
    ]
    try:
        yield made[0], made[1]
    finally:
        for backend in made:
            backend.close()


def behind(backend: Backend, sequence: int, tokens: list[int]) -> NDArray[np.float32]:
    row: NDArray[np.float32] = backend.step([Chunk(sequence, tokens, outputs=1)]).logits(0).copy()
    return row


def apart(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2)) / a.std())


def test_only_repacked_weights_are_copied(both: tuple[Backend, Backend]) -> None:
    laid_out, stored = (backend.memory() for backend in both)
    if not any(
        "REPACK" in place or "AMX" in place or "KLEIDI" in place for place in laid_out.places
    ):
        pytest.skip(f"this build lays out no Q4_K on this processor: {', '.join(laid_out.places)}")
    assert stored.weights_bytes <= laid_out.weights_bytes
    assert all(
        place.endswith("_Mapped") or not place.startswith("CPU_") for place in stored.places
    ), stored.places


def test_both_layouts_give_the_same_logits_except_for_rounding(
    both: tuple[Backend, Backend],
) -> None:
    rows = [behind(backend, backend.new_sequence(), PROMPT) for backend in both]
    assert apart(*rows) < NEAR


@pytest.mark.parametrize(
    "reader", [0, 1], ids=["laid out reads what stored wrote", "stored reads what laid out wrote"]
)
def test_kv_computed_with_one_layout_is_reused_with_the_other(
    both: tuple[Backend, Backend], reader: int
) -> None:
    here, there = both[reader], both[1 - reader]
    # One key on disk: a model that gets another plan after a benchmark still finds its
    # conversations.
    assert (here.info.fingerprint, here.info.kv_meaning) == (
        there.info.fingerprint,
        there.info.kv_meaning,
    )
    written = there.new_sequence()
    there.step([Chunk(written, PROMPT[:64], outputs=1)]).argmax(0)
    taken = here.new_sequence()
    here.import_range(taken, there.export_range(written, 0, 64), 0, 64)
    own = behind(here, here.new_sequence(), PROMPT)
    assert apart(own, behind(here, taken, PROMPT[64:])) < NEAR
