"""Embedding models with real llama.cpp: rows of length 1 that do not depend on the rest of the
batch, except for the 16-bit rounding of flash attention (2e-4 at most was seen)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localllm_backends.contract import LoadError
from localllm_backends.llamacpp.embed import LlamaCppEmbedder, load_embedder
from models.tiny_bert import CTX, E, write_bert


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")


@pytest.fixture(scope="module")
def embedder(bert: Path) -> Iterator[LlamaCppEmbedder]:
    loaded = load_embedder(str(bert))
    yield loaded
    loaded.close()


def test_an_embedder_reports_size_pooling_context_and_architecture(
    embedder: LlamaCppEmbedder,
) -> None:
    assert (embedder.n_embd, embedder.pooling, embedder.info.n_ctx) == (E, "mean", CTX)
    assert embedder.info.architecture == "bert"


def test_texts_get_the_marks_the_model_wants(embedder: LlamaCppEmbedder) -> None:
    tokens = embedder.tokenize("ab")
    assert (tokens[0], tokens[-1], len(tokens)) == (2, 3, 4)
    assert embedder.detokenize(tokens[1:-1]).strip() == "ab"


def test_a_row_has_length_one_and_does_not_depend_on_its_neighbours(
    embedder: LlamaCppEmbedder,
) -> None:
    texts = [
        embedder.tokenize(t)
        for t in ("hello", "a much longer text, with more words.", "x", "hello")
    ]
    together = embedder.embed(texts)
    assert together.shape == (4, E)
    assert np.allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    alone = np.concatenate([embedder.embed([t]) for t in texts])
    assert np.allclose(together, alone, atol=1e-3)
    assert np.allclose(together[0], together[3], atol=1e-3)
    assert not np.allclose(together[0], together[1], atol=1e-2)


def test_more_texts_than_fit_in_a_batch_use_several_batches(embedder: LlamaCppEmbedder) -> None:
    many = [embedder.tokenize("word " * (1 + i % 9)) for i in range(70)]
    rows = embedder.embed(many)
    assert np.allclose(rows[63], embedder.embed([many[63]])[0], atol=1e-3)
    full = [4] * CTX
    assert embedder.embed([full, full]).shape == (2, E)
    assert embedder.embed([]).shape == (0, E)


def test_cls_pooling_of_the_file_is_used_and_differs_from_other_poolings(
    tmp_path: Path, embedder: LlamaCppEmbedder
) -> None:
    cls = load_embedder(str(write_bert(tmp_path / "cls.gguf", pooling=2)))
    try:
        assert cls.pooling == "cls"
        tokens = cls.tokenize("hello")
        assert not np.allclose(cls.embed([tokens]), embedder.embed([tokens]), atol=1e-2)
    finally:
        cls.close()


def test_models_that_make_no_embeddings_are_refused_with_the_reason(
    tmp_path: Path, tiny_model: Path
) -> None:
    with pytest.raises(LoadError, match="generates text"):
        load_embedder(str(tiny_model))
    with pytest.raises(LoadError, match="no file"):
        load_embedder(str(tmp_path / "none.gguf"))
