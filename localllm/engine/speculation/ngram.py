"""Prompt lookup: what followed the same words last time, in this request, its predicted output or
recent answers.

Costs no model run. A Lookup follows its request token by token with a pointer into the text it
seems to be copying, so that in the middle of a copy a proposal is a slice. Every token that comes
also says whether the pointer was
right: acceptance is known without ever verifying a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.engine.speculation.controller import HitRates
from localllm.engine.tokens import TokenLine

_SEPARATOR = -1
# Matches longer than this are all the same: sure.
_MAX_MATCH = 64
# A pointer this good is followed without looking for a better one.
_TRUSTED_MATCH = 6
# The window searched, in tokens, bounds a search to some tens of microseconds.
_WINDOW_TOKENS = 65_536


class RecentOutputs:
    """What this engine wrote lately, for requests that write it again (tool calls, boilerplate,
    corrected answers)."""

    def __init__(self, capacity_tokens: int = 16_384) -> None:
        self._capacity = capacity_tokens
        self.line = TokenLine()

    def add(self, tokens: Sequence[int]) -> None:
        """A new line each time: who follows the one before goes on in that."""
        if len(tokens) >= 8:
            known = np.concatenate([self.line.view, [*tokens, _SEPARATOR]])
            self.line = TokenLine(known[-self._capacity :])


@dataclass
class _Pointer:
    """The next token is guessed to be `line[at]`; the last `match` tokens were the same there and
    here."""

    line: TokenLine
    at: int
    match: int


def longest_match(
    haystack: NDArray[np.int32], suffix: NDArray[np.int32], most: int = _MAX_MATCH
) -> tuple[int, int] | None:
    """(position after the match, its length) of the longest occurrence in `haystack` of what
    `suffix` ends with; the latest one where several are as long. An occurrence at the very end has
    nothing behind it and does not count.
    """
    if len(haystack) < 2 or not len(suffix):
        return None
    found = np.flatnonzero(haystack[:-1] == suffix[-1])
    if not len(found):
        return None
    length = 1
    while length < min(most, len(suffix)):
        inside = found[found >= length]
        longer = inside[haystack[inside - length] == suffix[-1 - length]]
        if not len(longer):
            break
        found = longer
        length += 1
    return int(found[-1]) + 1, length


class Lookup:
    """The n-gram drafter of one request."""

    def __init__(
        self,
        tokens: Sequence[int],
        rates: HitRates,
        recent: RecentOutputs,
        predicted: Sequence[int] = (),
    ) -> None:
        self._line = TokenLine(tokens)
        self._predicted = TokenLine(predicted)
        self._recent = recent
        self.rates = rates
        self._pointer: _Pointer | None = None
        if len(predicted):
            # A client that sends the expected output says where to start.
            self._pointer = _Pointer(self._predicted, 0, _TRUSTED_MATCH)

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were emitted: learn from each whether it was foreseen, and move on."""
        for token in tokens:
            pointer = self._valid()
            if pointer is not None:
                hit = int(pointer.line.view[pointer.at]) == token
                self.rates.observe(pointer.match, hit=hit)
                pointer.at += 1
                # One changed word in a long copy is no reason to lose the place.
                if hit:
                    pointer.match = min(pointer.match + 1, _MAX_MATCH)
                else:
                    pointer.match //= 4
                if not pointer.match:
                    self._pointer = None
        self._line.extend(tokens)

    def propose(self, most: int) -> tuple[list[int], int]:
        """(at most `most` tokens that may come next, length of the match they rest on); ([], 0)
        when nothing does."""
        pointer = self._valid()
        if pointer is None or pointer.match < _TRUSTED_MATCH:
            pointer = self._search(pointer)
        if pointer is None or most < 1:
            return [], 0
        tokens: list[int] = pointer.line.view[pointer.at : pointer.at + most].tolist()
        if pointer.line is self._line and tokens and len(tokens) < most:
            # The copy has caught up with itself: the text is repeating, and so does the guess.
            tokens = (tokens * (most // len(tokens) + 1))[:most]
        # The separator, or an image.
        foreign = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
        tokens = tokens[:foreign]
        return tokens, pointer.match

    def _valid(self) -> _Pointer | None:
        pointer = self._pointer
        if pointer is not None and pointer.at >= len(pointer.line):
            self._pointer = pointer = None
        return pointer

    def _search(self, best: _Pointer | None) -> _Pointer | None:
        own = self._line.view
        suffix = own[-_MAX_MATCH:]
        for line in (self._line, self._predicted, self._recent.line):
            text = line.view[-_WINDOW_TOKENS:]
            found = longest_match(text, suffix)
            if found is not None and found[1] > (best.match if best is not None else 1):
                at = found[0] + len(line) - len(text)
                best = _Pointer(line, at, found[1])
        self._pointer = best
        return best
