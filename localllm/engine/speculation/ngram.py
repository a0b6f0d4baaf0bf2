"""Prompt lookup: drafts the text that followed the last occurrence of the same words.

It searches the request itself, its predicted output and recent answers, and needs no model run. A
Lookup keeps a pointer into the text that the request seems to copy, and moves it with every token.
In the middle of a copy a proposal is therefore a slice. Every new token also shows whether the
pointer was right, so the acceptance rate is known without verifying a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from localllm.engine.speculation.controller import HitRates
from localllm.engine.tokens import TokenBuffer, Tokens

_SEPARATOR = -1
# Longer matches count as this long, because they are equally reliable.
_MAX_MATCH = 64
# A pointer with a match of this length is followed without searching for a better one.
_TRUSTED_MATCH = 6
# The search covers this many tokens, so it takes at most some tens of microseconds.
_WINDOW_TOKENS = 65_536
# Size of the table of pairs.
_PAIRS = 65_536


class SearchedText(TokenBuffer):
    """A text to search. It knows which pairs of tokens it does not contain (nearly all of them),
    because a search takes as long as a tenth of a tiny model's step.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._seen = bytearray(_PAIRS)
        self._last: list[int] = []
        super().__init__(tokens)

    def extend(self, tokens: Sequence[int] | Tokens) -> None:
        super().extend(tokens)
        known = [*self._last, *tokens]
        # No token follows the last pair, so it is added with the next token.
        for first, second in pairwise(known[:-1]):
            self._seen[_place(first, second)] = 1
        self._last = known[-2:]

    def may_continue(self, text: SearchedText) -> bool:
        """False if no token of this text follows the last two tokens of `text`."""
        return len(text) > 1 and self._seen[_place(*text._last)] > 0


def _place(first: int, second: int) -> int:
    """The place of a pair of tokens in the table of pairs. Several pairs share it."""
    return (31 * first + second) % _PAIRS


class RecentOutputs:
    """Recent answers of this engine, for requests that repeat them.

    Examples are tool calls, boilerplate and corrected answers.
    """

    def __init__(self, capacity_tokens: int = 16_384) -> None:
        self._capacity = capacity_tokens
        self.tokens = SearchedText()

    def add(self, tokens: Sequence[int]) -> None:
        """Add an answer. Makes a new text, so a pointer into the old one stays valid."""
        if len(tokens) >= 8:
            known = np.concatenate([self.tokens.view, [*tokens, _SEPARATOR]])
            self.tokens = SearchedText(known[-self._capacity :].tolist())


@dataclass
class _Pointer:
    """A position in a text: the next token is guessed to be `text[at]`.

    The last `match` tokens before it are equal to the request's last tokens.
    """

    text: SearchedText
    at: int
    match: int


def longest_match(
    haystack: NDArray[np.int32], suffix: NDArray[np.int32], max_match: int = _MAX_MATCH
) -> tuple[int, int] | None:
    """Find the longest occurrence in `haystack` of the last tokens of `suffix`.

    Returns (position after the match, its length), for the latest of equally long ones. An
    occurrence at the very end does not count, because no token follows it.
    """
    if len(haystack) < 2 or not len(suffix):
        return None
    found = np.flatnonzero(haystack[:-1] == suffix[-1])
    if not len(found):
        return None
    suffix = suffix[-max_match:]
    best = int(found[-1]) + 1
    # The latest occurrence is often a full match, in text that repeats. With a search token by token,
    # a proposal then took as long as a quarter of a tiny model's step.
    matched = _equal_at_the_end(haystack[:best], suffix)
    if matched == len(suffix):
        return best, matched
    length = 1
    while length < len(suffix) and len(found) > 1:
        inside = found[found >= length]
        longer = inside[haystack[inside - length] == suffix[-1 - length]]
        if not len(longer):
            break
        found = longer
        length += 1
    best = int(found[-1]) + 1
    return best, _equal_at_the_end(haystack[:best], suffix)


def _equal_at_the_end(text: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The number of tokens at their ends in which the two are equal."""
    n = min(len(text), len(other))
    different = np.flatnonzero(text[len(text) - n :] != other[len(other) - n :])
    if not len(different):
        return n
    return n - 1 - int(different[-1])


class PromptLookup:
    """The n-gram drafter of one request."""

    def __init__(
        self,
        tokens: Sequence[int],
        rates: HitRates,
        recent: RecentOutputs,
        predicted: Sequence[int] = (),
    ) -> None:
        self._request_text = SearchedText(tokens)
        self._predicted = SearchedText(predicted)
        self._recent = recent
        self._unread: list[int] = []
        self.rates = rates
        self._pointer: _Pointer | None = None
        if len(predicted):
            # The client sends the expected output, so the answer is expected to start there.
            self._pointer = _Pointer(self._predicted, 0, _TRUSTED_MATCH)

    def advance(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens. They are read with the next proposal, so that steps without one
        take no time.
        """
        self._unread.extend(tokens)

    def _read_new(self) -> None:
        """Learn from each new token whether it was predicted, and move the pointer."""
        # A pointer near the end of the request's text may predict a new token from another one.
        self._request_text.extend(self._unread)
        for token in self._unread:
            pointer = self._valid()
            if pointer is None:
                break
            hit = int(pointer.text.view[pointer.at]) == token
            self.rates.observe(pointer.match, hit=hit)
            pointer.at += 1
            # One changed word in a long copy is not enough to give up the position.
            if hit:
                pointer.match = min(pointer.match + 1, _MAX_MATCH)
            else:
                pointer.match //= 4
            if not pointer.match:
                self._pointer = None
        self._unread.clear()

    def propose(self, max_tokens: int) -> tuple[list[int], int]:
        """Return at most `max_tokens` draft tokens, and the length of the match they are based on.

        Returns ([], 0) if there is no match.
        """
        self._read_new()
        pointer = self._valid()
        if pointer is None or pointer.match < _TRUSTED_MATCH:
            pointer = self._search(pointer)
        if pointer is None or max_tokens < 1:
            return [], 0
        tokens: list[int] = pointer.text.view[pointer.at : pointer.at + max_tokens].tolist()
        if pointer.text is self._request_text and tokens and len(tokens) < max_tokens:
            # The pointer has reached the end of the request's own text, which is repeating. Repeat
            # the guess too.
            tokens = (tokens * (max_tokens // len(tokens) + 1))[:max_tokens]
        # Stop at the separator or an image.
        foreign = next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
        tokens = tokens[:foreign]
        return tokens, pointer.match

    def _valid(self) -> _Pointer | None:
        pointer = self._pointer
        if pointer is not None and pointer.at >= len(pointer.text):
            self._pointer = pointer = None
        return pointer

    def _search(self, best: _Pointer | None) -> _Pointer | None:
        suffix = self._request_text.view[-_MAX_MATCH:]
        for buffer in (self._request_text, self._predicted, self._recent.tokens):
            # Every match that is used has two tokens or more.
            if not buffer.may_continue(self._request_text):
                continue
            text = buffer.view[-_WINDOW_TOKENS:]
            found = longest_match(text, suffix)
            if found is not None and found[1] > (best.match if best is not None else 1):
                at = found[0] + len(buffer) - len(text)
                best = _Pointer(buffer, at, found[1])
        self._pointer = best
        return best
