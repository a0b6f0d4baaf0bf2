"""A call begun inside open reasoning: held back until it shows whether the model makes it or only speaks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localllm.conversation.deltas import CallReader, CallStart, Content, Delta


class ThoughtCall:
    """The text from an opening marker on, while nothing tells whether it is a call.

    A call ends the reply, with or without the reasoning's closing marker behind it. One that more words follow, or that
    the closing marker interrupts, was part of the thought.
    """

    def __init__(
        self,
        new_reader: Callable[[int, str], CallReader],
        first: int,
        markers: Sequence[str],
        closing: str,
        opened: str,
    ) -> None:
        """`opened` is the marker that was seen, `first` the number that a call here would have."""
        self._new_reader, self._markers, self._closing = new_reader, markers, closing
        self._reader: CallReader | None = new_reader(first, opened)
        self._next = first
        self._block = ""  # what the reader has taken
        self._behind = ""
        self._closed = False
        self.opened = self.raw = opened
        self.deltas: list[Delta] = []

    def feed(self, text: str) -> bool:
        """Take more text; False once it is clear that this is no call."""
        self.raw += text
        while True:
            if self._reader is None:
                text = self._behind + text
            elif not self._read(text):
                return False
            elif self._reader is not None:
                return True
            else:
                text = self._behind
            said = text.lstrip()
            self._behind = said
            following = [*self._markers, self._closing]
            found = max((m for m in following if said.startswith(m)), key=len, default=None)
            if found is None:
                return any(m.startswith(said) for m in following)
            if self._closed:
                return False  # the thought ended with it; the real call, or the answer, comes now
            text, self._behind = said[len(found) :], ""
            if found == self._closing:
                self._closed = True
            else:
                self._reader, self._block = self._new_reader(self._next, found), ""

    def close(self, cut: bool) -> bool:
        """The reply ended: True if this is a call, whose deltas are then complete."""
        if self._reader is not None:
            late = self._reader.close(cut)
            self.deltas += late
            last = not (self._reader.rest or "").strip()
            return not cut and last and _starts(self.deltas) > 0 and not any(isinstance(d, Content) for d in late)
        return not self._behind or cut

    def _read(self, text: str) -> bool:
        """Let the reader take `text`; False where it is no call."""
        assert self._reader is not None
        before = max(0, len(self._block) - len(self._closing))
        self._block += text
        deltas = self._reader.feed(text)
        self.deltas += deltas
        self._next += _starts(deltas)
        rest = self._reader.rest
        taken = len(self._block) - (len(rest) if rest is not None else 0)
        if self._closing in self._block[before:taken]:
            return False
        if rest is not None:
            self._reader, self._behind = None, rest
            return _starts(self.deltas) > 0 and not any(isinstance(d, Content) for d in deltas)
        return True


def _starts(deltas: Sequence[Delta]) -> int:
    """How many calls begin in `deltas`."""
    return sum(isinstance(d, CallStart) for d in deltas)
