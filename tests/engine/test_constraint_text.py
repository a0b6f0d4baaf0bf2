"""Constrained output with a SentencePiece vocabulary, whose tokenizer puts a space before each
text. Forced text is tokenized without that space, and whitespace between JSON's parts is
limited."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localllm.conversation.tools.lark import json_value
from localllm.engine.sampling.grammar import GrammarCompiler, Vocabulary
from localllm.errors import UnsupportedError
from localllm_backends.contract import Backend, LoadSpec
from localllm_backends.llamacpp import backend_type


@pytest.fixture(scope="module")
def backend(tiny_model: Path) -> Iterator[Backend]:
    loaded = backend_type.load(LoadSpec(path=str(tiny_model), n_ctx=256, n_seq_max=1))
    yield loaded
    loaded.close()


@pytest.mark.parametrize(
    "text", ["{", '{"name": "f", "arguments": ', "Ünïcode ✓", " w300", "a\n\tb", "\x02x", "\x02"]
)
def test_tokens_spell_exactly_the_text(backend: Backend, text: str) -> None:
    # the tokenizer's added space
    assert backend.tokenize("{", special=False)[0] != backend.tokenize(" {", special=False)[-1]
    vocabulary = Vocabulary(backend)
    tokens = vocabulary(text)
    assert b"".join(vocabulary.tokens[t] for t in tokens) == text.encode()


def test_half_a_character_is_not_spelled_as_another(backend: Backend) -> None:
    vocabulary = Vocabulary(backend)
    half = "✓".encode()[:2]
    assert b"".join(vocabulary.tokens[t] for t in vocabulary(half)) in (half, b"")


@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_a_schema_ends_though_the_model_prefers_space(backend: Backend, kind: str) -> None:
    schema = (
        '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], '
        '"additionalProperties": false}'
    )
    source = schema if kind == "json_schema" else f"start: {json_value(json.loads(schema))}\n"
    constraint = GrammarCompiler(backend)((kind, source))
    pieces: list[bytes] = []
    while not constraint.finished and len(pieces) < 150:
        row = np.zeros(backend.info.n_vocab, dtype=np.float32)
        for token in range(backend.info.n_vocab):
            if backend.token_bytes(token).isspace():
                row[token] = 10.0
            elif backend.token_bytes(token).isdigit():
                row[token] = -1.0
        constraint.apply(row)
        best = int(row.argmax())
        if best in backend.info.eog_tokens:
            break
        constraint.accept(best)
        pieces.append(backend.token_bytes(best))
    text = b"".join(pieces).decode()
    assert set(json.loads(text)) == {"a"}, text


@pytest.mark.parametrize(
    "source",
    [
        "",
        "root",
        "root ::= (",
        'root ::= "\\',
        'root ::= "a',
        "root ::= missing",
        "root ::= " + "(" * 3_000,
    ],
)
def test_a_gbnf_syntax_error_is_refused_with_our_own_message(backend: Backend, source: str) -> None:
    with pytest.raises(UnsupportedError, match=r"the gbnf can't be (parsed|enforced): .+"):
        GrammarCompiler(backend)(("gbnf", source))
