"""A real model on MLX: greedy text equals mlx-lm's, logits equal llama.cpp's for the same weights,
and concurrent requests change no answer.

MLX's Linux wheel multiplies matrices on one core without vector instructions, so these tests are
short. docs/mlx.md has the results of the long runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.drive import GREEDY, run
from localllm.engine.core import Engine
from localllm_backends.contract import Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.mlx import backend_type as mlx
from models.dequantised import write_dequantised
from models.mlx_from_gguf import convert
from support.requests import request_for

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
]

CACHE = Path(__file__).parent.parent.parent / ".cache" / "models"
NAME = "smollm2-135m-instruct-f32"
QUESTION = "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"
TEXT = (
    "A lighthouse is a tower with a bright light at the top, built where ships come near the "
    "land. Before there were "
    "maps and radios, sailors trusted it to tell them where the rocks were."
)


@pytest.fixture(
    scope="module", params=["few layers", pytest.param("smollm2", marks=pytest.mark.long)]
)
def source(request: pytest.FixtureRequest, smollm2: Path, few_layers: Path) -> Path:
    return smollm2 if request.param == "smollm2" else few_layers


@pytest.fixture(scope="module")
def folder(source: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of converted models. Slow conversions are made once and kept for later runs."""
    return CACHE if source == smollm2 else tmp_path_factory.mktemp("mlx")


@pytest.fixture(scope="module")
def backend(source: Path, folder: Path) -> Iterator[Any]:
    made = mlx.load(LoadSpec(str(convert(source, folder / NAME)), n_ctx=1024, n_seq_max=4))
    yield made
    made.close()


@pytest.mark.parametrize("n", [8, pytest.param(16, marks=pytest.mark.long)])
def test_greedy_text_is_mlx_lms_token_for_token(backend: Any, n: int) -> None:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    prompt = backend.tokenize(QUESTION)
    outcome = run(Engine(backend), request_for("q", prompt, max_tokens=n, sampling=GREEDY))
    made = (
        int(token)
        for token, _ in generate_step(mx.array(prompt), backend.stepper.model, max_tokens=n)
    )
    # Compare only up to the answer's end, which the longer run reaches: mlx-lm continues after it.
    theirs = list(takewhile(lambda token: token not in backend.info.eog_tokens, made))
    ours = [token for token in outcome.tokens["q"] if token not in backend.info.eog_tokens]
    assert ours == theirs


def test_text_and_logits_agree_with_llama_cpp_on_equal_weights(
    backend: Any, source: Path, folder: Path
) -> None:
    plain = folder / f"{NAME}.gguf"
    if not plain.exists():
        # llama.cpp rounds activations to 8 bits unless the weights are float32.
        write_dequantised(source, plain.with_suffix(".part")).rename(plain)
    other = llamacpp.load(
        LoadSpec(str(plain), n_ctx=512, kv_type_k="f32", kv_type_v="f32", n_outputs=64)
    )
    tokens = backend.tokenize(QUESTION + TEXT)
    assert tokens == other.tokenize(QUESTION + TEXT)
    for token in range(0, backend.info.n_vocab, 7):
        assert backend.token_bytes(token) == other.token_bytes(token)
        assert backend.token_bytes(token, special=True) == other.token_bytes(token, special=True)
        assert backend.is_control(token) == other.is_control(token)
    assert backend.info.chat_template == other.info.chat_template
    assert set(backend.info.eog_tokens) <= set(other.info.eog_tokens)
    rows = []
    for each in (backend, other):
        sequence = each.new_sequence()
        rows.append(each.step([Chunk(sequence, tokens[:32], outputs=32)]).logits(0).copy())
        each.drop(sequence)
    assert [int(r.argmax()) for r in rows[0]] == [int(r.argmax()) for r in rows[1]]
    assert np.sqrt(np.mean((rows[0] - rows[1]) ** 2)) < 0.01 * rows[0].std()
    other.close()


def test_concurrent_requests_get_the_same_answers_as_alone(backend: Any) -> None:
    questions = {
        q: backend.tokenize(f"<|im_start|>user\n{q}<|im_end|>\n")
        for q in ("Count to five.", "Who was Ada?")
    }
    alone = {
        q: run(
            Engine(backend), request_for(q, p, max_tokens=4, sampling=GREEDY, ignore_eos=True)
        ).tokens[q]
        for q, p in questions.items()
    }
    requests = [
        request_for(q, p, max_tokens=4, sampling=GREEDY, ignore_eos=True)
        for q, p in questions.items()
    ]
    together = run(Engine(backend), *requests)
    assert together.tokens == alone
