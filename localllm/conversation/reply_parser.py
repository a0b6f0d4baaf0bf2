"""Parses a model's streaming reply into answer, reasoning and tool calls.

An incomplete marker is never shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from localllm.grammars.markers import (
    QUOTES,
    first_marker,
    longer_may_come,
    may_begin_with,
    partial_marker,
)

# "<|" at the end of an answer may be an operator of a programming language. A longer partial marker
# is not.
_MAX_SHOWN_PARTIAL = 2


class ReplyParser:
    """Reads one reply piece by piece.

    The deltas of `feed` and `close` do not depend on how the text is split. Only the pieces of one
    text may be divided differently.
    """

    def __init__(self, format: ReplyFormat) -> None:  # noqa: A002 - the word of the trade
        self._format = format
        self._thinking = format.thinking
        self._has_reasoned = format.thinking
        self._pending = format.lead
        self._reader: CallReader | None = None  # reads anything open other than text
        self._one_call = not format.parallel
        self._ranges: dict[str, str] = {}  # opening to closing marker
        self._drops: list[str] = []
        self._ends = set(format.ends)
        for drop in format.drops:
            if isinstance(drop, tuple):
                opening, closing = drop
                self._ranges[opening] = closing
                self._drops.append(opening)
            else:
                self._drops.append(drop)
            if isinstance(drop, TurnEnd):
                self._ends.add(str(drop))
        self._ended = False
        # the current section is still empty: its leading newlines are separators
        self._section_is_empty = True
        self._last_shown = ""  # the last character shown
        self.calls = 0

    @property
    def thinking(self) -> bool:
        return self._thinking

    @property
    def in_call(self) -> bool:
        return self._reader is not None and not isinstance(self._reader, _Skipped | _PossibleCall)

    def feed(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        if not self._ended:
            self._read(text, deltas)
        return deltas

    def close(self, cut: bool = False) -> list[Delta]:
        """End of the reply: returns the deltas held back.

        `cut`: a limit or a stop text ended it, not the model. An incomplete call or marker is then
        dropped.
        """
        deltas: list[Delta] = []
        while self._reader is not None:
            reader = self._reader
            self._reader = None
            self._pass_on(reader.close(cut), deltas)
            self._read(reader.rest or "", deltas)
        pending = self._pending
        self._pending = ""
        if self._ended:
            return deltas
        if self._drops or cut:
            partial_length = partial_marker(pending, self._markers(pending))
            if partial_length > _MAX_SHOWN_PARTIAL:
                pending = pending[: len(pending) - partial_length].rstrip()
        if self._has_reasoned or self.calls:
            pending = pending.rstrip()
        self._show(pending, deltas)
        return deltas

    def _read(self, text: str, deltas: list[Delta]) -> None:
        """Read on in the current state until no text is left."""
        rest: str | None = text
        while rest is not None and (rest or self._pending):
            if self._reader is not None:
                self._pass_on(self._reader.feed(rest), deltas)
                rest = self._reader.rest
                if rest is not None:
                    self._reader = None
            else:
                rest = self._read_text(self._pending + rest, deltas)

    def _read_text(self, text: str, deltas: list[Delta]) -> str | None:
        """Show the text before the next marker, and enter the marker.

        Returns the text after the marker, or None if there is no marker.
        """
        markers = self._markers(text)
        marker_start, marker = first_marker(text, markers)
        n_held_back = partial_marker(text, markers)
        if marker is not None and longer_may_come(text[marker_start:], marker, markers):
            marker = None
            n_held_back = len(text) - marker_start
        if marker is None:
            shown = text
            if markers:
                # Space before a marker belongs to neither side, so it is held back.
                shown = text[: len(text) - n_held_back].rstrip()
            self._pending = text[len(shown) :]
            self._show(shown, deltas)
            return None
        self._pending = ""
        marker_end = marker_start + len(marker)
        if self._is_mention(marker, text[:marker_start]):
            self._show(text[:marker_end], deltas)
            return text[marker_end:]
        before = text[:marker_start].rstrip()
        self._show(before, deltas)
        gap = text[len(before) : marker_start]
        if not self._thinking or self._section_is_empty or marker not in self._thought_markers:
            self._enter_marker(marker)
        elif self._format.quotable and "\n" not in gap:
            self._show(gap + marker, deltas)
        else:  # a call's marker after some text of the reasoning
            self._reader = _PossibleCall(self._format, self.calls, gap, marker)
        if self._ended:
            return None
        return text[marker_end:]

    def _is_mention(self, marker: str, before: str) -> bool:
        """True if the text quotes the `marker` of a call."""
        last = (self._last_shown + before)[-1:]
        is_call = marker in self._format.call_markers
        return is_call and self._format.quotable and last != "" and last in QUOTES

    def _markers(self, text: str) -> list[str]:
        """The markers that count in `text`, which comes next."""
        think = self._format.think
        if self._thinking and not self._drops:
            assert think is not None
            return [think[1], *self._thought_markers, *self._format.ends]
        markers = [*self._format.call_markers, *self._drops, *self._format.ends]
        if think is not None and (self._drops or self._may_open_reasoning(text, think[0])):
            markers.append(think[0])
        return markers

    def _may_open_reasoning(self, text: str, opening: str) -> bool:
        """True if reasoning may begin: its marker counts only at the beginning of the answer."""
        is_first = not (self._has_reasoned or self._last_shown or self.calls)
        return is_first and may_begin_with(text, opening)

    @property
    def _thought_markers(self) -> Sequence[str]:
        """Markers that open calls inside the reasoning. Empty with `drops`: every marker then ends
        it."""
        if self._format.calls_in_reasoning and not self._drops:
            return self._format.call_markers
        return ()

    def _enter_marker(self, marker: str) -> None:
        think = self._format.think
        was_thinking = self._thinking
        self._thinking = False
        self._section_is_empty = True
        if think is not None and marker == think[0]:
            self._thinking = self._has_reasoned = True
        elif marker in self._ends:
            self._ended = True
        elif marker in self._ranges:
            self._reader = _Skipped(self._ranges[marker])
        elif marker not in self._drops and not (
            was_thinking and think is not None and marker == think[1]
        ):
            assert self._format.new_reader is not None
            self._reader = self._format.new_reader(self.calls, marker)

    def _show(self, text: str, deltas: list[Delta]) -> None:
        if self._section_is_empty and (
            self._thinking or self._has_reasoned or self.calls or self._drops
        ):
            text = text.lstrip()
        if not text:
            return
        self._section_is_empty = False
        self._last_shown = text[-1]
        deltas.append(ReasoningText(text) if self._thinking else Content(text))

    def _pass_on(self, deltas: list[Delta], out: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, CallStart):
                self.calls = delta.index + 1
                self._thinking = False
            if isinstance(delta, CallStart | CallArguments) and delta.index and self._one_call:
                continue
            out.append(delta)


class _Skipped(CallReader):
    """Structure to leave out, up to its `closing` marker."""

    def __init__(self, closing: str) -> None:
        self._closing = closing
        self._buffered = ""

    def feed(self, text: str) -> list[Delta]:
        before, closing, rest = (self._buffered + text).partition(self._closing)
        self._buffered = before[-len(self._closing) :]
        self.rest = rest if closing else None
        return []

    def close(self, cut: bool) -> list[Delta]:
        """The structure extends to the reply's end."""
        return []


class _PossibleCall(CallReader):
    """A possible call inside open reasoning, held back from its opening marker until it is certain.

    A call ends the reply, with or without the reasoning's closing marker after it. If more text
    follows, or the closing marker interrupts the call, it was part of the reasoning. Its marker is
    then shown, and the rest is read again.
    """

    def __init__(self, reply: ReplyFormat, calls: int, gap: str, marker: str) -> None:
        """`marker` is the marker, `calls` the number of calls before it, `gap` the space before
        it."""
        assert reply.think is not None
        without_reasoning = replace(reply, think=None, thinking=False, parallel=True, lead="")
        self._parser = ReplyParser(without_reasoning)
        self._parser.calls = calls
        self._closing = reply.think[1]
        self._n_read = 0  # of `raw`; a partial closing marker is held back
        self._has_closed = self._has_text = False
        self._gap = gap
        self._marker = marker
        self._raw = ""
        self._deltas: list[Delta] = []
        self.feed(marker)

    def feed(self, text: str) -> list[Delta]:
        self._raw += text
        end = self._raw.find(self._closing, self._n_read)
        self._has_closed = end >= 0
        if not self._has_closed:
            end = len(self._raw) - partial_marker(self._raw, [self._closing])
        self._collect(self._parser.feed(self._raw[self._n_read : end]))
        self._n_read = end
        rest = self._raw[end + len(self._closing) :]
        if self._has_text or (self._has_closed and (self._parser.in_call or rest.strip())):
            return self._as_thought()
        return []

    def close(self, cut: bool) -> list[Delta]:
        """End of the reply. A call that a cut left incomplete is not shown."""
        if cut:
            return [] if self._parser.in_call else self._deltas
        if not self._has_closed:
            self._collect(self._parser.feed(self._raw[self._n_read :]))
        self._collect(self._parser.close())
        if self._has_text or not self._deltas:
            return self._as_thought()
        return self._deltas

    def _collect(self, deltas: list[Delta]) -> None:
        self._deltas += deltas
        self._has_text |= any(isinstance(delta, Content) for delta in deltas)

    def _as_thought(self) -> list[Delta]:
        self.rest = self._raw[len(self._marker) :]
        return [ReasoningText(self._gap + self._marker)]
