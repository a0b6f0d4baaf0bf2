"""Parses a model's reply as it streams: answer, reasoning and tool calls, never showing half a marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localllm.conversation.reply import (
    CallArguments,
    CallReader,
    CallStart,
    Content,
    Delta,
    ReasoningText,
    ReplyFormat,
    TurnEnd,
)

# "<|" at the end of an answer may be an operator of somebody's language; more of a marker is none.
_BRACKETS = 2


class ReplyParser:
    """Reads one reply piece by piece. The deltas of `feed`s and `close` are the same however the text is cut, apart
    from where the pieces of one text are divided."""

    def __init__(self, format: ReplyFormat) -> None:  # noqa: A002 - the word of the trade
        self._format = format
        self._thinking = format.thinking
        self._thought = format.thinking
        self._held = format.lead
        self._reader: CallReader | None = None
        self._ranges = dict(d for d in format.drops if isinstance(d, tuple))
        self._drops = [d if isinstance(d, str) else d[0] for d in format.drops]
        self._ends = {str(d) for d in format.drops if isinstance(d, TurnEnd)} | set(format.ends)
        self._possible: _PossibleCall | None = None
        self._gap = ""  # the space before what may be a call
        self._until: str | None = None  # what is left out lasts to this marker
        self._over = False
        self._fresh = True  # the current section has shown nothing: its leading newlines are separators
        self.calls = 0

    @property
    def thinking(self) -> bool:
        return self._thinking

    @property
    def in_call(self) -> bool:
        return self._reader is not None

    def feed(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        if not self._over:
            self._read(text, out)
        return out

    def close(self, cut: bool = False) -> list[Delta]:
        """The reply ended: what was held back. `cut`: not by the model but by a limit or a stop text, so a call or a
        marker that is half there is no more than that."""
        out: list[Delta] = []
        while self._reader is not None:
            reader, self._reader = self._reader, None
            self._take(reader.close(cut), out)
            if reader.rest:
                self._fresh = True
                self._read(reader.rest, out)
        if self._possible is not None:
            self._decide(self._possible, cut, out)
        held, self._held = self._held, ""
        if self._until is not None or self._over:
            return out
        if self._drops or cut:
            half = _partial(held, self._markers())
            held = held[: len(held) - half].rstrip() if half > _BRACKETS else held
        self._show(held.rstrip() if self._thought or self.calls else held, out)
        return out

    def _read(self, text: str, out: list[Delta]) -> None:
        while text or self._held:
            if self._reader is not None:
                self._take(self._reader.feed(text), out)
                rest = self._reader.rest
                if rest is None:
                    return
                self._reader, text = None, rest
                self._fresh = True
                if not text:
                    return
                continue
            if self._possible is not None:
                possible = self._possible
                if possible.feed(text):
                    return
                text = self._dismiss(possible, out)
                continue
            text = self._held + text
            self._held = ""
            if self._until is not None:
                at = text.find(self._until)
                if at < 0:
                    self._held = text[max(0, len(text) - len(self._until) + 1) :]
                    return
                text, self._until = text[at + len(self._until) :], None
                continue
            markers = self._markers()
            at, marker = _first(text, markers)
            if marker is not None and any(len(m) > len(marker) and m.startswith(text[at:]) for m in markers):
                marker = None  # a longer marker may still come of it
                keep = len(text) - at
            else:
                keep = _partial(text, markers)
            if marker is None:
                # Space before a marker belongs to neither side: it waits with what may become one.
                shown = text[: len(text) - keep].rstrip() if markers else text
                self._held = text[len(shown) :]
                self._show(shown, out)
                return
            before = text[:at].rstrip()
            self._show(before, out)
            gap, text = text[len(before) : at], text[at + len(marker) :]
            if self._thinking and not self._fresh and marker in self._thought_markers:
                self._begin_possible(marker, gap, out)
            else:
                self._enter(marker)
            if self._over:
                return

    def _markers(self) -> list[str]:
        think = self._format.think
        if self._thinking and not self._drops:
            assert think is not None
            return [think[1], *self._thought_markers, *self._format.ends]
        markers = [*self._format.call_markers, *self._drops, *self._format.ends]
        if think is not None and (not self._thought or self._drops):
            markers.append(think[0])
        return markers

    @property
    def _thought_markers(self) -> Sequence[str]:
        """Markers that open calls inside the reasoning; where there are `drops`, every marker does."""
        return self._format.call_markers if self._format.calls_in_reasoning and not self._drops else ()

    def _begin_possible(self, marker: str, gap: str, out: list[Delta]) -> None:
        """A call's marker stands inside the reasoning, behind some of it."""
        think, new_reader = self._format.think, self._format.new_reader
        assert think is not None
        assert new_reader is not None
        if self._format.quotable and "\n" not in gap:
            self._show(gap + marker, out)
            return
        self._gap = gap
        self._possible = _PossibleCall(new_reader, self.calls, self._format.call_markers, think[1], marker)

    def _dismiss(self, possible: _PossibleCall, out: list[Delta]) -> str:
        """No call but part of the thought: its marker is shown, the rest is returned to be read."""
        self._possible = None
        self._show(self._gap + possible.opened, out)
        return possible.raw[len(possible.opened) :]

    def _decide(self, possible: _PossibleCall, cut: bool, out: list[Delta]) -> None:
        """The reply ended while it was unclear whether a call had begun. What a cut left half is not shown."""
        if possible.close(cut):
            self._possible, self._thinking = None, False
            self._take(possible.deltas, out)
        elif cut:
            self._possible = None
        while self._possible is not None:
            self._read(self._dismiss(self._possible, out), out)

    def _enter(self, marker: str) -> None:
        think = self._format.think
        was, self._thinking = self._thinking, False
        if think is not None and marker == think[0]:
            self._thinking = self._thought = True
            self._fresh = True
        elif marker in self._drops or marker in self._ends:
            self._fresh = True
            self._until = self._ranges.get(marker)
            self._over = marker in self._ends
        elif was and think is not None and marker == think[1]:
            self._fresh = True
        else:
            assert self._format.new_reader is not None
            self._reader = self._format.new_reader(self.calls, marker)

    def _show(self, text: str, out: list[Delta]) -> None:
        if self._fresh and (self._thinking or self._thought or self.calls or self._drops):
            text = text.lstrip()
        if not text:
            return
        self._fresh = False
        out.append(ReasoningText(text) if self._thinking else Content(text))

    def _take(self, deltas: list[Delta], out: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, CallStart):
                self.calls = delta.index + 1
            if not self._format.parallel and isinstance(delta, CallStart | CallArguments) and delta.index:
                continue
            out.append(delta)


def _first(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Where the first marker begins; of two at one place, the longer."""
    best, found = len(text), None
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (at < best or (at == best and found is not None and len(marker) > len(found))):
            best, found = at, marker
    return best, found


def _partial(text: str, markers: Sequence[str]) -> int:
    """Length of the longest tail of `text` that begins some marker."""
    longest = max((len(m) for m in markers), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        tail = text[-n:]
        if any(m.startswith(tail) for m in markers):
            return n
    return 0


class _PossibleCall:
    """A call begun inside open reasoning: the text from an opening marker on, while nothing tells whether it is a call.

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
    return sum(isinstance(d, CallStart) for d in deltas)
