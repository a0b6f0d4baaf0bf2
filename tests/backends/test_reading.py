"""A text that can't fit is detected by tokenizing a part of it. A text that fits is always
tokenized completely."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm_backends.contract import Backend, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.token_estimate import estimated_tokens

WINDOW = 256
PIECES = ("a", " ", "\U000e0001", "the cat sat ", "\n\n", "<|im_start|>", "0", "-" * 64)


@pytest.fixture(scope="module")
def backend(few_layers: Path) -> Iterator[Backend]:
    loaded = llamacpp.load(LoadSpec(str(few_layers), n_ctx=WINDOW))
    yield loaded
    loaded.close()


class Counting:
    """A backend that counts the characters that it tokenizes."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.info, self.n_chars = backend, backend.info, 0

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        self.n_chars += len(text)
        return self._backend.tokenize(text, special=special, add_bos=add_bos)


@pytest.mark.parametrize("piece", PIECES)
def test_tokenising_stops_once_a_text_exceeds_the_limit(backend: Backend, piece: str) -> None:
    reads = []
    for n_chars in (2**17, 2**20):
        counting = Counting(backend)
        n_tokens = estimated_tokens(counting, piece * (n_chars // len(piece)), WINDOW)  # type: ignore[arg-type]
        assert n_tokens is not None
        assert n_tokens > WINDOW
        reads.append(counting.n_chars)
    assert reads[0] == reads[1] < 2**17


@pytest.mark.parametrize("piece", PIECES)
def test_a_text_within_the_limit_is_not_estimated_as_too_long(backend: Backend, piece: str) -> None:
    for most in (2**8, 2**11, 2**14):
        text = piece * (2**16 // len(piece))
        if len(backend.tokenize(text)) <= most:
            assert estimated_tokens(backend, text, most) is None
