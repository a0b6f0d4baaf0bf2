"""A matcher over a vocabulary of bytes: whether a grammar allows a text, whatever the model."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from benchmarks.schemas import TOKENIZER
from localllm.errors import UnsupportedError
from localllm.grammars.json_schema import schemas_in
from localllm.grammars.reasons import reason_of


def matcher_of(grammar: str) -> LLMatcher:
    """A matcher of a compiled grammar. Raises UnsupportedError."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    if matcher.is_error():
        raise UnsupportedError(reason_of(matcher.get_error()).sentence)
    return matcher


def of_schema(schema: Any) -> LLMatcher:
    """A matcher of `schema` as the engine makes its grammar. Raises UnsupportedError."""
    return matcher_of(
        LLMatcher.grammar_from_lark(schemas_in(f"start: %json {json.dumps(schema)}\n"))
    )


def allows(matcher: LLMatcher, text: str) -> bool:
    """True where all of `text` is allowed, and may be the end."""
    state = matcher.deep_copy()
    return (
        state.try_consume_tokens(list(text.encode())) == len(text.encode()) and state.is_accepting()
    )
