"""What a model writes, taken apart as it comes: answer, reasoning and tool calls, never showing half a marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from localllm.conversation.deltas import CallArguments, CallReader, CallStart, Content, Delta, ReasoningText
from localllm.conversation.thought_calls import ThoughtCall

__all__ = [
    "CallArguments", "CallReader", "CallStart", "Content", "Delta", "Drop", "ReasoningText", "ReplyFormat",
    "ReplyParser", "TurnEnd", "think_markers", "turn_ends",
]  # fmt: skip


class TurnEnd(str):
    """A marker to leave out, behind which nothing belongs to the reply."""

    __slots__ = ()


Drop: TypeAlias = str | tuple[str, str]
"""Structure to leave out: one marker, or everything from an opening marker to a closing one."""


# (opening marker, closing marker) of reasoning, as they appear in templates.
THINK_MARKERS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)


def think_markers(template: str) -> tuple[str, str] | None:
    """The reasoning markers that `template` mentions, if any."""
    return next((pair for pair in THINK_MARKERS if pair[1] in template), None)


# Texts that end a turn and that no answer contains; some files don't mark them as the end of generation.
_TURN_ENDS = ("<|role_end|>",)


def turn_ends(template: str) -> tuple[str, ...]:
    """The texts ending a turn that `template` mentions."""
    return tuple(end for end in _TURN_ENDS if end in template)


# "<|" at the end of an answer may be an operator of somebody's language; more of a marker is none.
_BRACKETS = 2


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How to read one reply. `thinking` says that the prompt already opened the reasoning. `call_markers` open tool
    calls, `new_reader(calls so far, marker)` reads them. `drops` are structure to leave out; a format that has them
    marks everything, so any marker ends the reasoning and half a marker at the reply's end is not shown. `parallel`
    False lets only the first call through. `in_thought`: calls may come before the reasoning's end; `quotable`: their
    markers are text, which a thought may mention within a line. Behind one of `ends` nothing belongs to the reply. `lead` stands at
    the prompt's end and belongs to the first marker."""

    think: tuple[str, str] | None = None
    thinking: bool = False
    call_markers: Sequence[str] = ()
    new_reader: Callable[[int, str], CallReader] | None = None
    drops: Sequence[Drop] = ()
    parallel: bool = True
    in_thought: bool = False
    quotable: bool = True
    ends: Sequence[str] = ()
    lead: str = ""

    @property
    def plain(self) -> bool:
        """True when every text is the answer."""
        return self.think is None and not self.call_markers and not self.drops and not self.ends

    def parser(self) -> ReplyParser:
        """A fresh parser."""
        return ReplyParser(self)


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
        self._doubt: ThoughtCall | None = None
        self._gap = ""  # the space before what is in doubt
        self._until: str | None = None  # what is left out lasts to this marker
        self._over = False
        self._fresh = True  # the current section has shown nothing: its leading newlines are separators
        self.calls = 0

    @property
    def thinking(self) -> bool:
        """True while what comes is reasoning."""
        return self._thinking

    @property
    def in_call(self) -> bool:
        """True while what comes belongs to a tool call."""
        return self._reader is not None

    def feed(self, text: str) -> list[Delta]:
        """Take more text; returns what it makes certain."""
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
        if self._doubt is not None:
            self._decide(self._doubt, cut, out)
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
            if self._doubt is not None:
                doubt = self._doubt
                if doubt.feed(text):
                    return
                text = self._dismiss(doubt, out)
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
                self._suspect(marker, gap, out)
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
        return self._format.call_markers if self._format.in_thought and not self._drops else ()

    def _suspect(self, marker: str, gap: str, out: list[Delta]) -> None:
        """A call's marker stands inside the reasoning, behind some of it."""
        think, new_reader = self._format.think, self._format.new_reader
        assert think is not None
        assert new_reader is not None
        if self._format.quotable and "\n" not in gap:
            self._show(gap + marker, out)
            return
        self._gap = gap
        self._doubt = ThoughtCall(new_reader, self.calls, self._format.call_markers, think[1], marker)

    def _dismiss(self, doubt: ThoughtCall, out: list[Delta]) -> str:
        """No call but part of the thought: its marker is shown, the rest is returned to be read."""
        self._doubt = None
        self._show(self._gap + doubt.opened, out)
        return doubt.raw[len(doubt.opened) :]

    def _decide(self, doubt: ThoughtCall, cut: bool, out: list[Delta]) -> None:
        """The reply ended while a call was in doubt. What a cut left half is not shown."""
        if doubt.close(cut):
            self._doubt, self._thinking = None, False
            self._take(doubt.deltas, out)
        elif cut:
            self._doubt = None
        while self._doubt is not None:
            self._read(self._dismiss(self._doubt, out), out)

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
