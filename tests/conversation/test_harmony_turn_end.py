"""Harmony on a real vocabulary.

llama.cpp makes the tokens of its headers normal tokens, and ends the turn at two others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from conversation.test_trigger_control_tokens import FIRST, TOOLS, write_model
from localllm.conversation.template import ChatTemplate
from localllm.conversation.tools.constraints import answer_or_call, triggers_of
from localllm.conversation.tools.formats import harmony
from localllm.engine.sampling.grammar import GrammarCompiler
from localllm.server.generation.prompt import ResponseOptions, build_prompt
from localllm_backends.contract import Backend, LoadSpec
from localllm_backends.llamacpp import backend_type

# The tiny vocabulary already has <|end|>, as its end of text.
MARKERS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>")
CHANNEL, MESSAGE, START, CONSTRAIN, CALL, RETURN = range(FIRST, FIRST + len(MARKERS))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    path = tmp_path_factory.mktemp("harmony") / "harmony.gguf"
    write_model(path, MARKERS)
    loaded = backend_type.load(LoadSpec(path=str(path), n_ctx=256, n_seq_max=1))
    yield loaded
    loaded.close()


def test_the_call_and_return_tokens_end_generation_and_header_tokens_do_not(
    backend: Backend,
) -> None:
    ends = {m for i, m in enumerate(MARKERS) if FIRST + i in backend.info.eog_tokens}
    assert ends == {"<|call|>", "<|return|>"}
    for i, marker in enumerate(MARKERS):
        assert backend.tokenize(marker, special=True)[-1] == FIRST + i
        assert backend.token_bytes(FIRST + i, special=True) == marker.encode()


def test_a_call_is_constrained_with_the_headers_control_tokens(backend: Backend) -> None:
    assert not backend.is_control(MESSAGE)  # otherwise this test checks less than intended
    start = next(iter(triggers_of(harmony.FORMATS[0], "", TOOLS).values()))
    constraint = GrammarCompiler(backend)(start.grammar)
    text = backend.tokenize("\x02", special=False)

    def spelled(said: str) -> list[int]:
        return backend.tokenize("\x02" + said, special=False)[len(text) :]

    call = [*spelled("g "), CONSTRAIN, *spelled("json"), MESSAGE, *spelled('{"n": 2, "unit": "C"}')]
    assert constraint.acceptable(call) == len(call)
    for token in call:
        row = np.zeros(backend.info.n_vocab, dtype=np.float32)
        constraint.apply(row)
        assert row[token] == 0
        constraint.accept(token)
    assert constraint.finished


def test_one_grammar_allows_a_schema_answer_or_a_call(backend: Backend) -> None:
    lark = answer_or_call(harmony.FORMATS[0], "", TOOLS, '{"type": "integer"}', None)
    assert lark is not None
    constraint = GrammarCompiler(backend)(("lark", lark))
    row = np.zeros(backend.info.n_vocab, dtype=np.float32)
    constraint.apply(row)
    assert np.flatnonzero(row == 0).tolist() == [CHANNEL]


def test_a_schema_answer_is_in_the_final_channel_with_or_without_reasoning(
    backend: Backend,
) -> None:
    # Like gpt-oss's template: it supports tools, and the reply begins before any channel.
    template = ChatTemplate("{% if tools %}<|channel|>{% endif %}<|start|>assistant<|message|>")
    built = asyncio.run(
        build_prompt(template, [], ResponseOptions(grammar=("json_schema", '{"type": "integer"}')))
    )
    assert built.answer.grammar is not None

    def ids(text: str) -> list[int]:
        """Return the tokens of `text` without the space that this vocabulary adds before a text."""
        return backend.tokenize("\x02" + text, special=True)[
            len(backend.tokenize("\x02", special=False)) :
        ]

    final = [CHANNEL, *ids("final"), MESSAGE, *ids("42")]
    thought = [
        CHANNEL,
        *ids("analysis"),
        MESSAGE,
        *ids("So: "),
        *ids("<|end|>"),
        START,
        *ids("assistant"),
    ]
    for answer in (final, thought + final):
        constraint = GrammarCompiler(backend)(built.answer.grammar)
        assert constraint.acceptable(answer) == len(answer)
    bare = GrammarCompiler(backend)(built.answer.grammar)
    assert bare.acceptable(ids("42")) == 0
