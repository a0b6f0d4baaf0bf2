"""Tries a grammar in a separate process, with a vocabulary of single bytes.

llguidance's compile time and memory hardly depend on the vocabulary. A `LimitedChild` runs this
module. For each grammar (kind, source) it returns the text for llguidance, marked as `COMPILED`,
after it has compiled that text and computed the first token mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from localllm.errors import UnsupportedError
from localllm.grammars.deep_stack import check_parts, on_deep_stack
from localllm.grammars.gbnf import lark_of
from localllm.grammars.json_schema import schemas_in
from localllm.grammars.reasons import reason_of
from localllm.limited_child import serve

# llguidance marks special tokens by a byte that never occurs in UTF-8 text.
SPECIAL = b"\xff"
# The kind of a text that `grammar_text` has already made.
COMPILED = "compiled"
# Strings, regular expressions and comments of Lark, which are skipped, and names of tokens.
_TOKEN_NAME = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(<[^<>\s\[\]]+>)')


def grammar_text(kind: str, source: str, token_ids: Callable[[], Mapping[str, int]]) -> str:
    """The text for llguidance that expresses a grammar.

    `token_ids` is called if the grammar names tokens. Raises UnsupportedError with the part that
    can't be enforced.
    """
    from llguidance import LLMatcher

    try:
        check_parts(source)
        if kind == COMPILED:
            return source
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(source))
        if kind == "json_schema":
            source = f"start: %json {json.dumps(json.loads(source))}"
        if kind in ("json_schema", "lark", "gbnf"):
            lark = schemas_in(lark_of(source))
            ids_by_name: Mapping[str, int] = {}
            if "<" in lark:
                ids_by_name = token_ids()
            return str(LLMatcher.grammar_from_lark(_with_tokens(lark, ids_by_name)))
    except ValueError as e:
        raise UnsupportedError(f"the {kind} can't be parsed: {e}") from e
    except RecursionError as e:
        raise UnsupportedError(
            f"the {kind} can't be parsed: its rules refer to each other too often"
        ) from e
    raise UnsupportedError(f"unknown kind of grammar {kind!r}")


def matcher_of(tokenizer: Any, kind: str, text: str) -> Any:
    """llguidance's matcher of a `grammar_text`.

    Raises UnsupportedError with the part that can't be enforced.
    """
    from llguidance import LLMatcher

    def make() -> Any:
        return LLMatcher(tokenizer, text, log_level=0)

    matcher = on_deep_stack(text, make)
    if matcher.is_error():
        raise UnsupportedError(
            f"the {kind} can't be enforced: {reason_of(matcher.get_error()).sentence}"
        )
    return matcher


def _with_tokens(lark: str, token_ids: Mapping[str, int]) -> str:
    """`lark`, with ids in place of the token names that llguidance does not know.

    llguidance knows only control tokens by name. llama.cpp makes plain tokens of gpt-oss's
    <|channel|>, <|message|>, <|start|> and <|constrain|>.
    """

    def with_id(match: re.Match[str]) -> str:
        token = token_ids.get(match[1])
        if token is None:
            return match[0]
        return f"<[{token}]>"

    return _TOKEN_NAME.sub(with_id, lark)


class _ByteVocabulary:
    """A vocabulary with the model's size and special tokens, whose other tokens are single
    bytes."""

    def __init__(self, n_vocab: int, special: Mapping[str, int]) -> None:
        self.eos_token_id = self.bos_token_id = None
        self.special_token_ids = list(special.values())
        special_spellings = {token: SPECIAL + name.encode() for name, token in special.items()}
        single_bytes = iter([bytes([i]) for i in range(256)])
        self.tokens = [special_spellings.get(i) or next(single_bytes, b"") for i in range(n_vocab)]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, str):
            text = text.encode()
        return list(text)


def _trial_of(setup: Mapping[str, Any]) -> Callable[[Any], tuple[str, str]]:
    import llguidance

    vocabulary = _ByteVocabulary(setup["n_vocab"], setup["special"])
    tokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary), eos_token=setup["eog"], slices=[]
    )

    def token_ids() -> Mapping[str, int]:
        ids_by_name: Mapping[str, int] = setup["named"]
        return ids_by_name

    def compiled(grammar: tuple[str, str]) -> tuple[str, str]:
        kind, source = grammar
        text = grammar_text(kind, source, token_ids)
        matcher = matcher_of(tokenizer, kind, text)
        matcher.compute_bitmask()
        matcher.compute_ff_tokens()
        return COMPILED, text

    # imports and builds everything that is needed once
    compiled(("json_schema", '{"type": "string"}'))
    return compiled


if __name__ == "__main__":
    serve(_trial_of)
