"""Constrained output through llguidance: JSON schema, Lark, regex or GBNF, over any backend's
vocabulary."""

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
from localllm.grammars.number_end import NumberEnd
from localllm.grammars.reasons import why_stuck
from localllm.grammars.trial import SPECIAL, grammar_text, matcher_of
from localllm.limited_child import ChildLimits, LimitedChild, Stages
from localllm_backends.contract import Backend

_NO_WORD = "\x02"
# For each byte of a mask, the most that its eight tokens' logits may be: inf where the bit is set,
# else -inf. (Four times as quick as setting what is forbidden: a processor can't guess which of
# 262,144 bits are set. And `take` is nine times as quick as the same by brackets.)
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MOST = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)


def tokens_within(backend: Backend, text: bytes, *, special: bool) -> list[int]:
    """The tokens that spell `text` in the middle of a text, or [] if the tokenizer offers none.
    `special`: names of control tokens become those tokens."""
    # SentencePiece puts a space before the beginning of a text. After a letter that belongs to no
    # word it does not.
    for lead in ("", _NO_WORD):
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
    """What llguidance's TokenizerWrapper asks of a tokenizer, and the `tokenizer` made of it."""

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
        """What grammars are tried with (grammars/trial.py): how many tokens there are, the
        `special` ones and those that look as if they were by their names."""
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
        """The tokens that spell `text` in the middle of a text, or [] where the tokenizer has no
        way to say."""
        data = text if isinstance(text, bytes) else text.encode()
        return tokens_within(self._backend, data, special=False)


class GrammarCompiler:
    """Makes a GrammarMatcher from (kind, source), in any thread. The vocabulary is prepared on first
    use, which takes about a second."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._vocabulary: Vocabulary | None = None
        self._preparing = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        """The backend's."""
        with self._preparing:
            self._vocabulary = self._vocabulary or Vocabulary(self._backend)
            return self._vocabulary

    def _named_tokens(self) -> Any:
        return self.vocabulary.outline()["named"]

    def __call__(self, grammar: tuple[str, str], beginning: str = "") -> GrammarMatcher:
        """The matcher of an answer that begins with `beginning`: of the rest of the answer if the
        grammar allows that, otherwise of what follows it. Raises UnsupportedError,
        saying what can't be enforced."""
        text = grammar_text(*grammar, self._named_tokens)
        matcher = matcher_of(self.vocabulary.tokenizer, grammar[0], text)
        tokens = self.vocabulary(beginning) if beginning else []
        if matcher.try_consume_tokens(tokens) < len(tokens):  # all of it or nothing
            matcher.reset()
        return GrammarMatcher(matcher, self.vocabulary.number_end if "%json" in text else None)


class GrammarMatcher:
    """One request's place in its grammar. `number_end`: numbers in it need an end."""

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

    def copy(self) -> GrammarMatcher:
        """Another place in the same grammar, which keeps this one alive: the grammar's beginning,
        where this is never advanced."""
        return GrammarMatcher(self._matcher.deep_copy(), self._number_end, self)

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

    def acceptable(self, tokens: Sequence[int]) -> int:
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
    def accepting(self) -> bool:
        """True if the text so far may be the whole of it."""
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """True when nothing may follow."""
        return bool(self._matcher.is_stopped())


COMPILE_S = 10.0  # a request waits no longer for its grammar
# From a grammar as (kind, source), and the answer's beginning if the prompt ends with it.
MakeMatcher = Callable[[tuple[str, str], str], GrammarMatcher]
# What compiling may take. Nearly all grammars are done within the first; what isn't begins anew
# within the second, behind its like, and is then compiled here, where nothing can end it.
_LIMITS = (ChildLimits(0.05, 32 * 2**20), ChildLimits(1.0, 96 * 2**20, nice=10))


def trials(compiler: GrammarCompiler) -> Stages:
    """Where a grammar is tried before `compiler` is given it."""
    return Stages(
        [
            LimitedChild("localllm.grammars.trial", most, lambda: compiler.vocabulary.outline())
            for most in _LIMITS
        ]
    )


def _time_limit() -> float:
    """When a compilation that starts now is given up (time.monotonic)."""
    return time.monotonic() + COMPILE_S


@dataclass(eq=False)
class Compilation:
    """A grammar that is being compiled: once `done`, there is its `matcher`, or the reason why it is
    `refused`. It ends soon after its request has `left`."""

    grammar: tuple[str, str]
    beginning: str = ""
    matcher: GrammarMatcher | None = None
    refused: str = f"it takes over {COMPILE_S:g} s to make"
    ended: bool = False
    left: bool = False
    until_s: float = field(default_factory=_time_limit)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it."""
        return not self.left and time.monotonic() <= self.until_s

    @property
    def done(self) -> bool:
        """Whether there is nothing more to wait for: it is made, refused, or takes too long."""
        return self.ended or not self.wanted


class BackgroundCompiler:
    """Makes matchers beside the engine's thread, of grammars that passed `trials`; `news` is set
    with each that is done."""

    def __init__(self, make: MakeMatcher, trials: Stages, news: threading.Event) -> None:
        self._make = make
        self._trials = trials
        self._news = news
        # What requests hold now: choices of one request share theirs.
        self._held: WeakValueDictionary[tuple[str, ...], GrammarMatcher] = WeakValueDictionary()
        self._copying = threading.Lock()

    def start(self, grammar: tuple[str, str], beginning: str = "") -> Compilation:
        """Start to compile the `grammar` of an answer that begins with `beginning`."""
        compilation = Compilation(grammar, beginning)
        finish = partial(self._finish, compilation)
        self._trials.submit(grammar, lambda: compilation.wanted, finish)
        return compilation

    def close(self) -> None:
        """End what is tried; what is compiled ends within the limits."""
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
            self._news.set()

    def _matcher(self, kind: str, text: str, beginning: str) -> GrammarMatcher:
        key = kind, text, beginning
        made = self._held.get(key) or self._make((kind, text), beginning)
        self._held[key] = made
        with self._copying:
            return made.copy()
