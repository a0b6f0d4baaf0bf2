"""Assigns token log-probabilities to visible text: reasoning, tool calls and markers get none."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from localllm.engine.messages import TokenLogprob

# What is shown of a partial UTF-8 character, once it is known to stay one.
_BROKEN = "\ufffd"


class VisibleTokens:
    """Tokens whose text has not been shown yet. Text is shown in order; some is delayed by the
    parser, some never shown."""

    def __init__(self) -> None:
        self._pending: deque[TokenLogprob] = deque()
        self._open = ""  # the rest of the last token, beyond the text shown so far
        self._halves: list[TokenLogprob] = []  # that made no character yet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        self._pending.extend(tokens)

    def clear(self) -> None:
        """Drop them: their text belongs to no answer."""
        self._pending.clear()
        self._open = ""
        self._drop_halves()

    def _drop_halves(self) -> None:
        self._halves = []
        self._decoder.reset()

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """The tokens that `text` consists of; those before them are dropped, as their text is not
        shown."""
        if self._open and text.startswith(self._open):
            text = text[len(self._open) :]
        self._open = ""
        taken: list[TokenLogprob] = []
        while text and self._pending:
            token = self._pending.popleft()
            self._halves.append(token)
            piece = self._decoder.decode(token.text.encode("utf-8", "surrogateescape"))
            if not piece:
                continue
            left = _unmatched(text, piece)
            if left is None:
                self._drop_halves()
                continue
            text, self._open = left
            taken += self._halves
            self._halves = []
        if self._halves and text.startswith(_BROKEN):
            taken += self._halves
            self._drop_halves()
        return tuple(taken)


def _unmatched(text: str, piece: str) -> tuple[str, str] | None:
    """What is left of a text that begins with `piece`, or of a `piece` that begins with the text;
    None where neither does. Blanks before a piece may not be shown."""
    for form in (piece, piece.lstrip()):
        if form and text.startswith(form):
            return text[len(form) :], ""
        if form and form.startswith(text):
            return "", form[len(text) :]
    return None
