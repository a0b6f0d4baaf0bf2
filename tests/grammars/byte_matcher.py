"""A matcher over a vocabulary of bytes: whether a grammar allows a text, whatever the model."""

from __future__ import annotations

import json
from typing import Any

import llguidance
from llguidance import LLMatcher, LLTokenizer

from localllm.conversation.tools.lark import SPACE


class _Bytes:
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"\xff<eos>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), eos_token=[256])


def matcher_of(grammar: str) -> LLMatcher:
    """A matcher of a compiled grammar, which must be one."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def of_schema(schema: Any) -> LLMatcher:
    schema = {"allOf": [schema]} if isinstance(schema, bool) else schema
    return matcher_of(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": SPACE}))


def allows(matcher: LLMatcher, text: str) -> bool:
    """True where all of `text` is allowed, and may be the end."""
    state = matcher.deep_copy()
    return state.try_consume_tokens(list(text.encode())) == len(text.encode()) and state.is_accepting()
