"""A grammar tried in a process of its own, with a vocabulary of single bytes: how long llguidance
takes to compile one, and how much memory, hardly depends on the words.

A `LimitedChild` runs this module: asked with a grammar (kind, source), it answers with the grammar
in the words that llguidance is given (`COMPILED`), once those have been compiled and the first token
sought.
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

# llguidance marks special tokens by a byte that UTF-8 text never has.
SPECIAL = b"\xff"
# A grammar's text that was made by `grammar_text` already.
COMPILED = "compiled"
# Strings, regular expressions and comments of Lark, which are skipped, and tokens called by their
# names.
_TOKEN_NAME = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(<[^<>\s\[\]]+>)')


def grammar_text(kind: str, source: str, token_ids: Callable[[], Mapping[str, int]]) -> str:
    """What llguidance is given for a grammar; `token_ids` are asked for where it calls a token by
    its name. Raises UnsupportedError, saying what can't be enforced."""
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
            named: Mapping[str, int] = {}
            if "<" in lark:
                named = token_ids()
            return str(LLMatcher.grammar_from_lark(_with_tokens(lark, named)))
    except ValueError as e:
        raise UnsupportedError(f"the {kind} can't be read: {e}") from e
    except RecursionError as e:
        raise UnsupportedError(
            f"the {kind} can't be read: its rules lead to one another too often"
        ) from e
    raise UnsupportedError(f"unknown kind of grammar {kind!r}")


def matcher_of(tokenizer: Any, kind: str, text: str) -> Any:
    """llguidance's matcher of a `grammar_text`. Raises UnsupportedError, saying what can't be
    enforced."""
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
    """`lark` with names of tokens that are no control tokens here as their ids: llguidance knows
    only the others by name, and llama.cpp makes plain tokens of gpt-oss's <|channel|>,
    <|message|>, <|start|> and <|constrain|>."""

    def by_id(found: re.Match[str]) -> str:
        token = token_ids.get(found[1])
        if token is None:
            return found[0]
        return f"<[{token}]>"

    return _TOKEN_NAME.sub(by_id, lark)


class _Bytes:
    """A vocabulary as large as the model's and with its special tokens, whose words are single
    bytes."""

    def __init__(self, n_vocab: int, special: Mapping[str, int]) -> None:
        self.eos_token_id = self.bos_token_id = None
        self.special_token_ids = list(special.values())
        spelled = {token: SPECIAL + name.encode() for name, token in special.items()}
        words = iter([bytes([i]) for i in range(256)])
        self.tokens = [spelled.get(i) or next(words, b"") for i in range(n_vocab)]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, str):
            text = text.encode()
        return list(text)


def _trial(setup: Mapping[str, Any]) -> Callable[[Any], tuple[str, str]]:
    import llguidance

    vocabulary = _Bytes(setup["n_vocab"], setup["special"])
    tokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary), eos_token=setup["eog"], slices=[]
    )

    def token_ids() -> Mapping[str, int]:
        named: Mapping[str, int] = setup["named"]
        return named

    def tried(grammar: tuple[str, str]) -> tuple[str, str]:
        kind, source = grammar
        text = grammar_text(kind, source, token_ids)
        matcher = matcher_of(tokenizer, kind, text)
        matcher.compute_bitmask()
        matcher.compute_ff_tokens()
        return COMPILED, text

    tried(("json_schema", '{"type": "string"}'))  # what is imported and built once
    return tried


if __name__ == "__main__":
    serve(_trial)
