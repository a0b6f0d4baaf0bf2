"""The end of a thinking budget: when it is spent, the model's own end-of-thought text is forced, token by token.

What is forced at a place depends on the tokens before it and on nothing else, so that a drafted token is verified
against the very distribution it would have been drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from localllm.engine.messages import ThinkingLimit

# Models open their reasoning with the answer's first words, if at all: behind that many tokens none is looked for.
_OPENS_WITHIN = 16


class ThoughtLimit:
    """One request's limit. Thinking begins behind the prompt where that opened it, else behind the opening marker at
    the answer's beginning."""

    def __init__(
        self,
        limit: ThinkingLimit,
        n_prompt: int,
        tokenize: Callable[[str], list[int]],
        text: Callable[[int], bytes],
    ) -> None:
        self._limit, self._n_prompt, self._tokenize, self._text = limit, n_prompt, tokenize, text
        self._opening, self._closing = limit.opening.encode(), limit.closing.encode()
        # A model that was cut off in the middle of its closing marker is given the rest of it.
        self._endings = {0: tokenize(limit.closing + limit.behind)}
        longest = len(self._endings[0]) + len(self._closing)
        self._first = n_prompt + limit.tokens
        self._last = self._first + longest + (0 if limit.opened else _OPENS_WITHIN)

    def may_force(self, length: int, ahead: int = 0) -> bool:
        """False where none of the tokens at `length` and up to `ahead` behind it can be forced."""
        return self._first <= length + ahead and length <= self._last

    def forced(self, history: Seq[int]) -> int | None:
        """The token that must follow `history` (prompt and answer so far); None where the model may choose."""
        if not self.may_force(len(history)):
            return None
        begin = self._begin(history)
        if begin is None:
            return None
        end = begin + self._limit.tokens
        at = len(history) - end
        if at < 0:
            return None
        thought = b"".join(self._text(t) for t in history[begin:end])
        if self._closing in thought:
            return None
        ending = self._ending(_overlap(thought, self._closing))
        return ending[at] if at < len(ending) else None

    def _begin(self, history: Seq[int]) -> int | None:
        if self._limit.opened:
            return self._n_prompt
        said = b""
        for i, token in enumerate(history[self._n_prompt : self._n_prompt + _OPENS_WITHIN]):
            said = (said + self._text(token)).lstrip()
            if said.startswith(self._opening):
                return self._n_prompt + i + 1
            if not self._opening.startswith(said):
                return None
        return None

    def _ending(self, overlap: int) -> list[int]:
        if overlap not in self._endings:
            rest = self._closing[overlap:].decode("utf-8", "replace")
            self._endings[overlap] = self._tokenize(rest + self._limit.behind)
        return self._endings[overlap]


def _overlap(text: bytes, marker: bytes) -> int:
    """Bytes at the end of `text` that begin `marker`."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
