"""Constrained output through llguidance: JSON schema, Lark, regex or GBNF, over any backend's
vocabulary."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.engine.sampling.row import Row
from localllm.errors import UnsupportedError
from localllm.grammars.deep_stack import check_parts, on_deep_stack
from localllm.grammars.gbnf import lark_of
from localllm.grammars.json_schema import schemas_in
from localllm.grammars.number_end import NumberEnd
from localllm.grammars.reasons import reason_of, why_stuck
from localllm_backends.contract import Backend

# llguidance marks special tokens by a byte that UTF-8 text never has.
_SPECIAL = b"\xff"
_NO_WORD = "\x02"
# Strings, regular expressions and comments of Lark, which are skipped, and tokens called by their
# names.
_TOKEN_NAME = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(<[^<>\s\[\]]+>)')


# For each byte of a mask, the most that its eight tokens' logits may be: inf where the bit is set,
# else -inf. (Four times as quick as setting what is forbidden: a processor can't guess which of
# 262,144 bits are set. And `take` is nine times as quick as the same by brackets.)
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MOST = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)


class Vocabulary:
    """What llguidance's TokenizerWrapper asks of a tokenizer."""

    def __init__(self, backend: Backend) -> None:
        info = backend.info
        self._backend = backend
        self.eos_token_id = info.eos_token if info.eos_token is not None else info.eog_tokens[0]
        self.bos_token_id = info.bos_token
        self.special_token_ids = [t for t in range(info.n_vocab) if backend.is_control(t)]
        self.tokens = [backend.token_bytes(t, special=True) for t in range(info.n_vocab)]
        for token in self.special_token_ids:
            self.tokens[token] = _SPECIAL + self.tokens[token]
        self.number_end = NumberEnd(self.tokens)

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens that spell `text` in the middle of a text, or [] where the tokenizer has no
        way to say."""
        data = text if isinstance(text, bytes) else text.encode()
        text = data.decode("utf-8", "replace")
        # SentencePiece puts a space before what it takes for a beginning: behind a letter of no
        # word it does not.
        for lead in ("", _NO_WORD):
            head = self._backend.tokenize(lead, special=False) if lead else []
            tokens = self._backend.tokenize(lead + text, special=False)
            rest = tokens[len(head) :]
            if tokens[: len(head)] == head and b"".join(self.tokens[t] for t in rest) == data:
                return rest
        return []


class GrammarCompiler:
    """Makes a Constraint from (kind, source), in any thread. The vocabulary is prepared on first
    use, which takes about a second."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tokenizer: Any = None
        self._vocabulary: Vocabulary | None = None
        self._named: dict[str, int] = {}
        self._preparing = threading.Lock()

    def __call__(self, grammar: tuple[str, str], answer_start: str = "") -> Constraint:
        """The constraint behind `answer_start`, an answer's beginning: of the rest of the answer
        where the grammar allows that to begin so, else of what follows. Raises UnsupportedError,
        saying what can't be enforced."""
        from llguidance import LLMatcher

        kind, source = grammar
        try:
            check_parts(source)
            if kind == "json_schema":
                compiled = LLMatcher.grammar_from_lark(
                    schemas_in(f"start: %json {json.dumps(json.loads(source))}")
                )
            elif kind == "regex":
                compiled = LLMatcher.grammar_from_regex(source)
            elif kind in ("lark", "gbnf"):
                compiled = LLMatcher.grammar_from_lark(
                    self._with_tokens(schemas_in(lark_of(source)))
                )
            else:
                raise UnsupportedError(f"unknown kind of grammar {kind!r}")
            tokenizer = self._prepared()
            matcher = on_deep_stack(compiled, lambda: LLMatcher(tokenizer, compiled, log_level=0))
        except ValueError as e:
            raise UnsupportedError(f"the {kind} can't be read: {e}") from e
        except RecursionError as e:
            raise UnsupportedError(
                f"the {kind} can't be read: its rules lead to one another too often"
            ) from e
        if matcher.is_error():
            raise UnsupportedError(
                f"the {kind} can't be enforced: {reason_of(matcher.get_error()).sentence}"
            )
        assert self._vocabulary is not None
        tokens = self._vocabulary(answer_start) if answer_start else []
        if matcher.try_consume_tokens(tokens) < len(tokens):  # all of the beginning or nothing
            matcher.reset()
        return Constraint(
            matcher,
            self._vocabulary.number_end if kind == "json_schema" or "%json" in source else None,
        )

    def _prepared(self) -> Any:
        """llguidance's tokenizer; fills `_vocabulary` and `_named` as well."""
        import llguidance

        with self._preparing:
            if self._tokenizer is None:
                vocabulary = self._vocabulary = Vocabulary(self._backend)
                self._named = {
                    spelling.decode("utf-8", "replace"): token
                    for token, spelling in enumerate(vocabulary.tokens)
                    if spelling.startswith(b"<") and spelling.endswith(b">")
                }
                eog = list(self._backend.info.eog_tokens)
                self._tokenizer = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(vocabulary), eos_token=eog
                )
            return self._tokenizer

    def _with_tokens(self, lark: str) -> str:
        """`lark` with names of tokens that are no control tokens here as their ids: llguidance
        knows only the others by name, and llama.cpp makes plain tokens of gpt-oss's <|channel|>,
        <|message|>, <|start|> and <|constrain|>."""
        if "<" not in lark:
            return lark
        self._prepared()

        def by_id(found: re.Match[str]) -> str:
            token = self._named.get(found[1]) if found[1] else None
            return found[0] if token is None else f"<[{token}]>"

        return _TOKEN_NAME.sub(by_id, lark)


class Constraint:
    """One request's place in its grammar. `number_end`: numbers in it need an end."""

    def __init__(self, matcher: Any, number_end: NumberEnd | None = None) -> None:
        self._matcher, self._number_end = matcher, number_end
        self._digits = 0

    def allowed(self) -> NDArray[np.uint8]:
        """A bit for each token that the grammar allows next, the lowest first."""
        mask = self._matcher.compute_bitmask()
        if self._number_end:
            mask = self._number_end.ended(mask, self._digits)
        return np.frombuffer(mask, dtype=np.uint8)

    def apply(self, logits: Row) -> None:
        """Set what the grammar forbids next to -inf."""
        most = _MOST.take(self.allowed(), axis=0).reshape(-1)[: len(logits)]
        np.minimum(logits[: len(most)], most, out=logits[: len(most)])
        logits[len(most) :] = -np.inf

    def accept(self, token: int) -> None:
        """Advance by a chosen token."""
        self._matcher.consume_token(token)
        if self._number_end:
            self._digits = self._number_end.digits_behind(token, self._digits)

    def acceptable(self, tokens: Seq[int]) -> int:
        """How many of `tokens` the grammar would accept in a row from here, without advancing."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self) -> list[int]:
        """The tokens of the text that must come next."""
        return list(self._matcher.compute_ff_tokens())

    @property
    def stuck(self) -> bool:
        """True where the grammar's end can't be reached: nothing may follow, what was taken was not
        allowed, or it is too much work."""
        return bool(self._matcher.is_error())

    @property
    def why_stuck(self) -> str:
        """The same in words."""
        return why_stuck(self._matcher.get_error())

    @property
    def finished(self) -> bool:
        """True when nothing may follow."""
        return bool(self._matcher.is_stopped())


COMPILE_S = 10.0  # a request waits no longer for its grammar
# (grammar as (kind, source), the answer's beginning that stands in the prompt already) to its
# constraint.
MakeConstraint = Callable[[tuple[str, str], str], Constraint]


@dataclass(frozen=True)
class Compilation:
    """One grammar on its way: once `done`, there is its `constraint`, or why there is none in
    `error`."""

    making: Future[Constraint]
    until: float = field(default_factory=lambda: time.monotonic() + COMPILE_S)

    @property
    def done(self) -> bool:
        """Whether there is nothing more to wait for: it is made, refused, or takes too long."""
        return self.making.done() or time.monotonic() > self.until

    @property
    def constraint(self) -> Constraint | None:
        """What was made of it, once it is `done`."""
        return (
            self.making.result() if self.making.done() and self.making.exception() is None else None
        )

    @property
    def error(self) -> str:
        """Why there is no constraint although it is `done`."""
        reason = (
            self.making.exception()
            if self.making.done()
            else (f"it takes over {COMPILE_S:g} s to make")
        )
        return f"the constraint can't be enforced: {reason}"


# Each compilation has a thread of its own, so that one that takes long holds up no other.
_MOST_COMPILATIONS = 256


class BackgroundCompiler:
    """Makes constraints beside the engine's thread."""

    def __init__(self, make: MakeConstraint) -> None:
        self._make = make
        self._threads = ThreadPoolExecutor(_MOST_COMPILATIONS, "grammar")
        self._making: list[Future[Constraint]] = []

    def start(self, grammar: tuple[str, str], answer_start: str) -> Compilation:
        """Begin with `grammar`, of an answer that begins with `answer_start`."""
        compilation = Compilation(self._threads.submit(self._make, grammar, answer_start))
        self._making.append(compilation.making)
        return compilation

    def wait(self, seconds: float) -> None:
        """Until some compilation is done, or for so long."""
        self._making = [making for making in self._making if not making.done()]
        wait(self._making, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Wait for those that still read the backend's vocabulary."""
        self._threads.shutdown()
