"""Constrained output through llguidance: JSON schema, Lark, regex or GBNF, over any backend's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from localllm.engine.sampling import Constraint, Row
from localllm.errors import UnsupportedError
from localllm_backends.contract import Backend

# llguidance marks special tokens by a byte that UTF-8 text never has.
_SPECIAL = b"\xff"


class _Vocabulary:
    """What llguidance's TokenizerWrapper asks of a tokenizer."""

    def __init__(self, backend: Backend) -> None:
        info = backend.info
        self._backend = backend
        self.eos_token_id = info.eos_token if info.eos_token is not None else info.eog_tokens[0]
        self.bos_token_id = info.bos_token
        special = [t for t in range(info.n_vocab) if backend.is_control(t)]
        self.special_token_ids = special
        self.tokens = [backend.token_bytes(t, special=True) for t in range(info.n_vocab)]
        for token in special:
            self.tokens[token] = _SPECIAL + self.tokens[token]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._backend.tokenize(text, special=False)


class GrammarCompiler:
    """Makes a Constraint from (kind, source). The vocabulary is prepared on first use, which takes about a second."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tokenizer: Any = None

    def __call__(self, grammar: tuple[str, str]) -> Constraint:
        """Raises UnsupportedError, saying what can't be enforced."""
        import llguidance
        from llguidance import LLMatcher

        kind, source = grammar
        try:
            if kind == "json_schema":
                compiled = LLMatcher.grammar_from_json_schema(source)
            elif kind == "regex":
                compiled = LLMatcher.grammar_from_regex(source)
            elif kind == "lark":
                compiled = LLMatcher.grammar_from_lark(source)
            elif kind == "gbnf":
                from llguidance.gbnf_to_lark import any_to_lark

                compiled = LLMatcher.grammar_from_lark(any_to_lark(source))
            else:
                raise UnsupportedError(f"unknown kind of grammar {kind!r}")
        except ValueError as e:
            raise UnsupportedError(f"the {kind} can't be read: {e}") from e
        if self._tokenizer is None:
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._backend))
            eog = list(self._backend.info.eog_tokens)
            self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=eog)
        matcher = LLMatcher(self._tokenizer, compiled, log_level=0)
        if matcher.is_error():
            raise UnsupportedError(f"the {kind} can't be enforced: {_first_line(matcher.get_error())}")
        return MatcherConstraint(matcher, self._backend.info.n_vocab)


class MatcherConstraint:
    """One request's place in its grammar."""

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab

    def apply(self, logits: Row) -> None:
        """Set what the grammar forbids next to -inf."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._n_vocab].astype(bool)
        logits[: len(allowed)][~allowed] = -np.inf
        logits[len(allowed) :] = -np.inf

    def accept(self, token: int) -> None:
        """Advance by a chosen token."""
        self._matcher.consume_token(token)

    def acceptable(self, tokens: Seq[int]) -> int:
        """How many of `tokens` the grammar would accept in a row from here, without advancing."""
        return int(self._matcher.validate_tokens(list(tokens)))

    @property
    def finished(self) -> bool:
        """True when nothing may follow."""
        return bool(self._matcher.is_stopped())


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
