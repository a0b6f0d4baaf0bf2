"""Constrained output through llguidance: JSON schema, Lark, regex or GBNF, for any backend's
vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from localllm.engine.sampling.row import Row
from localllm.grammars.compile_limit import SPECIAL, grammar_text, matcher_of
from localllm.grammars.number_end import NumberEnd
from localllm.grammars.reasons import why_stuck
from localllm.limited_child import ChildLimits, LimitedChild, Stages
from localllm_backends.contract import Backend

_UNKNOWN_CHARACTER = "\x02"
# For each byte of a mask, the maximum logits of its eight tokens: inf if the bit is set, else
# -inf. This is four times as fast as setting the forbidden ones, because a processor can't predict
# which of 262,144 bits are set. `take` is nine times as fast as indexing with brackets.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BYTE_MAXIMA = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)


def tokens_within(backend: Backend, text: bytes, *, special: bool) -> list[int]:
    """The tokens that spell `text` in the middle of a text, or [] if that is impossible.

    `special`: names of control tokens become those tokens.
    """
    # SentencePiece adds a space at the beginning of a text, but not after a character that is in
    # no word.
    for lead in ("", _UNKNOWN_CHARACTER):
        head: list[int] = []
        if lead:
            head = backend.tokenize(lead, special=False)
        tokens = backend.tokenize(lead + text.decode("utf-8", "replace"), special=special)
        rest = tokens[len(head) :]
        spelled = b"".join(backend.token_bytes(token, special=True) for token in rest)
        if tokens[: len(head)] == head and spelled == text:
            return rest
    return []


class Vocabulary:
    """The tokenizer interface that llguidance's TokenizerWrapper needs, and the `tokenizer` made
    of it.
    """

    def __init__(self, backend: Backend) -> None:
        import llguidance

        info = backend.info
        self._backend = backend
        if info.eos_token is not None:
            self.eos_token_id = info.eos_token
        else:
            self.eos_token_id = info.eog_tokens[0]
        self.bos_token_id = info.bos_token
        self.special_token_ids = [t for t in range(info.n_vocab) if backend.is_control(t)]
        self.tokens = [backend.token_bytes(t, special=True) for t in range(info.n_vocab)]
        for token in self.special_token_ids:
            self.tokens[token] = SPECIAL + self.tokens[token]
        self.number_end = NumberEnd(self.tokens)
        wrapped = llguidance.TokenizerWrapper(self)
        self.tokenizer: Any = llguidance.LLTokenizer(wrapped, eos_token=list(info.eog_tokens))

    def outline(self) -> dict[str, Any]:
        """The data that trial compilations need (grammars/compile_limit.py).

        It has the number of tokens, the `special` ones, and those whose names look special.
        """
        names = [spelling.decode("utf-8", "replace") for spelling in self.tokens]
        return {
            "n_vocab": len(names),
            "special": {names[t][1:]: t for t in self.special_token_ids},
            "named": {
                name: t for t, name in enumerate(names) if name[:1] == "<" and name[-1:] == ">"
            },
            "eog": self._backend.info.eog_tokens,
        }

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens that spell `text` in the middle of a text, or [] if that is impossible."""
        data = text if isinstance(text, bytes) else text.encode()
        return tokens_within(self._backend, data, special=False)


class GrammarCompiler:
    """Makes a GrammarMatcher from (kind, source), in any thread.

    The vocabulary is prepared on first use, which takes about a second.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._vocabulary: Vocabulary | None = None
        self._preparing = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        """The backend's vocabulary."""
        with self._preparing:
            self._vocabulary = self._vocabulary or Vocabulary(self._backend)
            return self._vocabulary

    def _named_tokens(self) -> Any:
        return self.vocabulary.outline()["named"]

    def __call__(self, grammar: tuple[str, str], beginning: str = "") -> GrammarMatcher:
        """The matcher for an answer that begins with `beginning`.

        If the grammar allows `beginning`, the matcher covers the rest of the answer. Otherwise the
        grammar applies to the text after `beginning`. Raises UnsupportedError if a part can't be
        enforced.
        """
        text = grammar_text(*grammar, self._named_tokens)
        matcher = matcher_of(self.vocabulary.tokenizer, grammar[0], text)
        tokens = self.vocabulary(beginning) if beginning else []
        if matcher.try_consume_tokens(tokens) < len(tokens):  # either all of it, or start again
            matcher.reset()
        return GrammarMatcher(matcher, self.vocabulary.number_end if "%json" in text else None)


# Limit of the time that a grammar may compute on the engine's thread: at first, and for each token.
# All requests wait meanwhile.
_FIRST_S = 0.5
_TOKEN_S = 0.05


class _Budget:
    """Measures the work of one request's grammar, as a context."""

    def __init__(self) -> None:
        self._left_s = _FIRST_S
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._left_s -= time.thread_time() - self._began_s

    def earn(self) -> None:
        """Add the time for one more token."""
        self._left_s = min(self._left_s + _TOKEN_S, _FIRST_S)

    @property
    def spent(self) -> bool:
        """Whether the work exceeded the limit."""
        return self._left_s < 0


class GrammarMatcher:
    """The position of one request in its grammar. `number_end`: numbers in it need an end."""

    def __init__(
        self,
        matcher: Any,
        number_end: NumberEnd | None = None,
        origin: GrammarMatcher | None = None,
    ) -> None:
        self._matcher = matcher
        self._number_end = number_end
        self._origin = origin
        self._digits = 0
        self._budget = _Budget()

    def copy(self) -> GrammarMatcher:
        """A copy at the same position, which keeps this matcher alive.

        If this matcher is never advanced, copies start at the beginning of the grammar.
        """
        return GrammarMatcher(self._matcher.deep_copy(), self._number_end, self)

    def allowed(self) -> NDArray[np.uint8]:
        """A bit for each token that the grammar allows next, the lowest first."""
        with self._budget:
            mask = self._matcher.compute_bitmask()
            if self._number_end:
                mask = self._number_end.ended(mask, self._digits)
        return np.frombuffer(mask, dtype=np.uint8)

    def apply(self, logits: Row) -> None:
        """Set the logits of tokens that the grammar forbids next to -inf."""
        max_logits = _BYTE_MAXIMA.take(self.allowed(), axis=0).reshape(-1)[: len(logits)]
        np.minimum(logits[: len(max_logits)], max_logits, out=logits[: len(max_logits)])
        logits[len(max_logits) :] = -np.inf

    def accept(self, token: int) -> None:
        """Advance by a chosen token."""
        self._budget.earn()
        with self._budget:
            self._matcher.consume_token(token)
            if self._number_end:
                self._digits = self._number_end.digits_at_end(token, self._digits)

    def acceptable(self, tokens: Sequence[int]) -> int:
        """The number of leading `tokens` that the grammar would accept from here, without
        advancing.
        """
        with self._budget:
            return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self) -> list[int]:
        """The tokens of the text that must come next."""
        with self._budget:
            return list(self._matcher.compute_ff_tokens())

    @property
    def stuck(self) -> bool:
        """True if the grammar's end can't be reached.

        Either no token may follow, a forbidden token was taken, or the work is too much.
        """
        return self._budget.spent or bool(self._matcher.is_error())

    @property
    def why_stuck(self) -> str:
        """Why the end can't be reached, as text for the client."""
        if self._budget.spent:
            return "the grammar is too complex: its longest text or its largest object is too long"
        return why_stuck(self._matcher.get_error())

    @property
    def accepting(self) -> bool:
        """True if the text so far may be complete."""
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """True if no token may follow."""
        return bool(self._matcher.is_stopped())


COMPILE_S = 10.0  # a request waits at most this long for its grammar
# From a grammar as (kind, source), and the answer's beginning if the prompt ends with it.
MakeMatcher = Callable[[tuple[str, str], str], GrammarMatcher]
# Limits of trial compilations. Nearly all grammars compile within the first limits. Others start
# again with the second limits, in a queue with others of their kind. A grammar that passes is then
# compiled in this process, where the compilation can't be aborted.
_LIMITS = (ChildLimits(0.05, 32 * 2**20), ChildLimits(1.0, 96 * 2**20, nice=10))


def trials(compiler: GrammarCompiler) -> Stages:
    """The stages in which a grammar is tried before `compiler` compiles it."""
    return Stages(
        [
            LimitedChild(
                "localllm.grammars.compile_limit", limits, lambda: compiler.vocabulary.outline()
            )
            for limits in _LIMITS
        ]
    )


def _time_limit() -> float:
    """The time.monotonic value at which a compilation that starts now is given up."""
    return time.monotonic() + COMPILE_S


@dataclass(eq=False)
class Compilation:
    """A grammar that is being compiled.

    When it is `done`, it has a `matcher`, or `refused` is the reason, or it `was_late`. It ends soon
    after its request has `abandoned`.
    """

    grammar: tuple[str, str]
    beginning: str = ""
    matcher: GrammarMatcher | None = None
    refused: str = ""
    ended: bool = False
    abandoned: bool = False
    until_s: float = field(default_factory=_time_limit)

    @property
    def wanted(self) -> bool:
        """Whether the request still waits for it."""
        return not self.abandoned and time.monotonic() <= self.until_s

    @property
    def done(self) -> bool:
        """Whether the wait is over: it is compiled, refused, or takes too long."""
        return self.ended or not self.wanted

    @property
    def was_late(self) -> bool:
        """Whether it was given up. The trials limit computing to much less than `COMPILE_S`, so it
        waited for other work."""
        return self.done and not self.ended


class BackgroundCompiler:
    """Compiles grammars outside the engine's thread, after they passed `trials`.

    It sets `wake` after each compilation.
    """

    def __init__(self, make: MakeMatcher, trials: Stages, wake: threading.Event) -> None:
        self._make = make
        self._trials = trials
        self._wake = wake
        # Matchers in use by requests. Choices of one request share theirs.
        self._matchers: WeakValueDictionary[tuple[str, ...], GrammarMatcher] = WeakValueDictionary()
        self._copying = threading.Lock()

    def start(self, grammar: tuple[str, str], beginning: str = "") -> Compilation:
        """Start to compile the `grammar` of an answer that begins with `beginning`."""
        compilation = Compilation(grammar, beginning)
        finish = partial(self._finish, compilation)
        self._trials.submit(grammar, lambda: compilation.wanted, finish)
        return compilation

    def close(self) -> None:
        """Abort the trials. Compilations in progress end within the limits."""
        self._trials.close()

    def _finish(self, compilation: Compilation, tried: tuple[str, str] | None, reason: str) -> None:
        try:
            if tried is not None:
                compilation.matcher = self._matcher(*tried, compilation.beginning)
        except Exception as e:
            reason = str(e)
        if compilation.wanted:
            compilation.ended = True
            compilation.refused = reason
            self._wake.set()

    def _matcher(self, kind: str, text: str, beginning: str) -> GrammarMatcher:
        key = kind, text, beginning
        matcher = self._matchers.get(key) or self._make((kind, text), beginning)
        self._matchers[key] = matcher
        with self._copying:
            return matcher.copy()
