"""Assigns token log-probabilities to visible text: reasoning, tool calls and markers get none."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from localllm.engine.messages import TokenLogprob

# What half a character reads as.
_BROKEN = "\ufffd"
_LONGEST_CHAR = 4


class VisibleTokens:
    """The tokens heard and not yet told. Text is told in the order it was heard, some later and some never."""

    def __init__(self) -> None:
        self._heard: deque[TokenLogprob] = deque()
        self._open = ""  # what the last token told has behind the text that was told

    def hear(self, tokens: Sequence[TokenLogprob]) -> None:
        """More tokens."""
        self._heard.extend(tokens)

    def forget(self) -> None:
        """What was heard is no answer."""
        self._heard.clear()
        self._open = ""

    def told(self, text: str) -> tuple[TokenLogprob, ...]:
        """The tokens that `text` is made of. Those before it stood for nothing that is told."""
        if not self._heard:
            return ()
        if self._open and text.startswith(self._open):
            text = text[len(self._open) :]
        self._open = ""
        taken: list[TokenLogprob] = []
        broken = False
        while text and self._heard:
            token = self._heard.popleft()
            said = token.text
            if _BROKEN in said and _BROKEN not in text:
                taken.append(token)
                broken = True
                continue
            at = text.find(said, 0, len(said) + _LONGEST_CHAR) if broken and said else 0
            broken = False
            text = text[max(0, at) :]
            said = said if text.startswith(said) else said.lstrip()
            if said and text.startswith(said):
                text = text[len(said) :]
            elif said and said.startswith(text):
                self._open, text = said[len(text) :], ""
            else:
                continue
            taken.append(token)
        return tuple(taken)
