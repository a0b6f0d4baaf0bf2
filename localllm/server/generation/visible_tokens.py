"""Assigns token log-probabilities to visible text: reasoning, tool calls and markers get none."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from localllm.engine.messages import TokenLogprob

# A partial UTF-8 character decodes to this.
_BROKEN = "\ufffd"
_LONGEST_CHAR = 4


class VisibleTokens:
    """Tokens whose text has not been shown yet. Text is shown in order; some is delayed by the parser, some never shown."""

    def __init__(self) -> None:
        self._pending: deque[TokenLogprob] = deque()
        self._open = ""  # the rest of the last token, beyond the text shown so far

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        self._pending.extend(tokens)

    def clear(self) -> None:
        """Drop them: their text belongs to no answer."""
        self._pending.clear()
        self._open = ""

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """The tokens that `text` consists of; those before them are dropped, as their text is not shown."""
        if not self._pending:
            return ()
        if self._open and text.startswith(self._open):
            text = text[len(self._open) :]
        self._open = ""
        taken: list[TokenLogprob] = []
        broken = False
        while text and self._pending:
            token = self._pending.popleft()
            piece = token.text
            if _BROKEN in piece and _BROKEN not in text:
                taken.append(token)
                broken = True
                continue
            at = text.find(piece, 0, len(piece) + _LONGEST_CHAR) if broken and piece else 0
            broken = False
            text = text[max(0, at) :]
            piece = piece if text.startswith(piece) else piece.lstrip()
            if piece and text.startswith(piece):
                text = text[len(piece) :]
            elif piece and piece.startswith(text):
                self._open, text = piece[len(text) :], ""
            else:
                continue
            taken.append(token)
        return tuple(taken)
