"""A matcher over a vocabulary of bytes: it checks texts against a grammar without a model."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from benchmarks.schemas import TOKENIZER
from localllm.errors import UnsupportedError
from localllm.grammars.json_schema import schemas_in
from localllm.grammars.reasons import reason_of


def matcher_of(grammar: str) -> LLMatcher:
    """Return a matcher of a compiled grammar. Raises UnsupportedError."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    if matcher.is_error():
        raise UnsupportedError(reason_of(matcher.get_error()).sentence)
    return matcher


def of_schema(schema: Any) -> LLMatcher:
    """Return a matcher of `schema` with the engine's grammar. Raises UnsupportedError."""
    return matcher_of(
        LLMatcher.grammar_from_lark(schemas_in(f"start: %json {json.dumps(schema)}\n"))
    )


def allows(matcher: LLMatcher, text: str) -> bool:
    """Return whether `text` is allowed and may end there."""
    state = matcher.deep_copy()
    return (
        state.try_consume_tokens(list(text.encode())) == len(text.encode()) and state.is_accepting()
    )
