"""Mermaid's sequence diagrams in box characters."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from localllm_tui.control.terminal import printable
from localllm_tui.widgets.canvas import Canvas

_MAX_STEPS = 80
_MAX_PARTICIPANTS = 12
_PARTICIPANT = re.compile(r"(?:create +)?(?:participant|actor) +(\S+)(?: +as +(.+))?$")
_MESSAGE = re.compile(
    r"([^\s:+-]+?) *(<<-->>|<<->>|-->>|->>|--[x)>]|-[x)>]) *[+-]? *([^\s:]+) *:? *(.*)$"
)
_NOTE = re.compile(r"(?i:note) +(over|left of|right of) +([^\s:,]+)(?: *, *([^\s:]+))? *: *(.*)$")
_BLOCK = re.compile(r"(loop|alt|else|opt|par|and|critical|option|break|rect|end|box)\b *(.*)$")
_WITHOUT_EFFECT = re.compile(r"(activate|deactivate|destroy|links?|autonumber\s+off)\b|autonumber$")


@dataclass(frozen=True, slots=True)
class _SequenceStep:
    """A message, a note or a line of a block. `first` and `last`: numbers of participants."""

    kind: str  # an arrow, "note" or "block"
    first: int
    last: int
    text: str


class _UnreadableSequenceError(ValueError):
    """A line that is no part of a sequence diagram, or a diagram that is too large."""


def sequence_rows(lines: Sequence[str], width: int) -> list[str]:
    """The rows of a diagram whose first line is `sequenceDiagram`; [] if it can't be read or needs
    more cells than `width`."""
    diagram = _Sequence()
    try:
        for line in lines[1:]:
            diagram.read(line)
    except _UnreadableSequenceError:
        return []
    if not diagram.steps:
        return []
    return diagram.drawn(width)


class _Sequence:
    def __init__(self) -> None:
        self._ids: list[str] = []
        self._names: list[str] = []
        self._numbered = False
        self._n_messages = 0
        self.steps: list[_SequenceStep] = []

    def read(self, line: str) -> None:
        """Read one line. Raises _UnreadableSequenceError."""
        participant = _PARTICIPANT.match(line)
        if participant is not None:
            n = self._number(participant[1])
            self._names[n] = _plain(participant[2] or participant[1])
            return
        if _WITHOUT_EFFECT.match(line):
            self._numbered = self._numbered or line == "autonumber"
            return
        self.steps.append(self._step(line))
        if len(self.steps) > _MAX_STEPS:
            raise _UnreadableSequenceError("too long")

    def _step(self, line: str) -> _SequenceStep:
        note = _NOTE.match(line)
        if note is not None:
            first = self._number(note[2])
            last = self._number(note[3] or note[2])
            return _SequenceStep("note", min(first, last), max(first, last), _plain(note[4]))
        block = _BLOCK.match(line)
        if block is not None:
            return _SequenceStep("block", 0, 0, f"{block[1]} {_plain(block[2])}".rstrip())
        message = _MESSAGE.match(line)
        if message is None:
            raise _UnreadableSequenceError(line)
        text = _plain(message[4])
        self._n_messages += 1
        if self._numbered:
            text = f"{self._n_messages}. {text}"
        return _SequenceStep(message[2], self._number(message[1]), self._number(message[3]), text)

    def _number(self, name: str) -> int:
        if name not in self._ids:
            if len(self._ids) == _MAX_PARTICIPANTS:
                raise _UnreadableSequenceError("too wide")
            self._ids.append(name)
            self._names.append(_plain(name))
        return self._ids.index(name)

    # -- drawing -----------------------------------------------------------------------------------

    def drawn(self, width: int) -> list[str]:
        columns = self._columns()
        needed = columns[-1] + _half(self._names[-1]) + 1
        for step in self.steps:
            right = columns[step.last]
            if step.kind == "block":
                right = cell_len(step.text) + 4
            elif step.kind == "note":
                right = (columns[step.first] + right) // 2 + cell_len(step.text) // 2 + 3
            elif step.first == step.last:
                right += 6 + cell_len(step.text)
            needed = max(needed, right + 1)
        if needed > width:
            return []
        canvas = Canvas(needed, 4 + sum(_height(step) for step in self.steps) + 1)
        end = 3
        for step in self.steps:
            end += _height(step)
        for x, name in zip(columns, self._names, strict=True):
            half = _half(name)
            canvas.put(x - half, 0, f"┌{'─' * (2 * half - 1)}┐")
            canvas.put(x - half, 1, f"│{_centred(name, 2 * half - 1)}│")
            canvas.down(x, 3, end)
            canvas.put(x - half, 2, f"└{'─' * (half - 1)}┬{'─' * (half - 1)}┘")
        y = 3
        for step in self.steps:
            self._draw(step, canvas, columns, y, needed)
            y += _height(step)
        return [row for row in canvas.rows() if row]

    def _columns(self) -> list[int]:
        """The column of each participant's line: as close as names and texts allow."""
        columns = [_half(self._names[0])]
        for n in range(1, len(self._names)):
            x = columns[-1] + _half(self._names[n - 1]) + _half(self._names[n]) + 2
            for step in self.steps:
                first = min(step.first, step.last)
                if step.kind == "block" or first == n or max(step.first, step.last) != n:
                    continue
                x = max(x, columns[first] + cell_len(step.text) + 4)
            for first, room in self._room_right_of(n - 1):
                x = max(x, columns[first] + room)
            columns.append(x)
        margin = self._room_on_the_left() - columns[0]
        return [x + max(0, margin) for x in columns]

    def _room_right_of(self, n: int) -> Iterator[tuple[int, int]]:
        """The cells that messages of participant `n` to itself, and its notes, need."""
        for step in self.steps:
            if step.kind != "block" and step.first == step.last == n:
                room = cell_len(step.text) + 7
                if step.kind == "note":
                    room = cell_len(step.text) // 2 + 4
                yield n, room

    def _room_on_the_left(self) -> int:
        rooms = [0]
        for step in self.steps:
            if step.kind == "note" and step.first == 0:
                rooms.append(cell_len(step.text) // 2 + 2)
        return max(rooms)

    def _draw(
        self, step: _SequenceStep, canvas: Canvas, columns: list[int], y: int, width: int
    ) -> None:
        if step.kind == "block":
            canvas.put(0, y, f"╌╌ {step.text} ".ljust(width, "╌"))
        elif step.kind == "note":
            _draw_note(step, canvas, columns, y)
        elif step.first == step.last:
            x = columns[step.first]
            canvas.put(x, y, f"├──┐ {step.text}")
            canvas.put(x, y + 1, "│◄─┘")
        else:
            _draw_message(step, canvas, columns, y)


def _draw_note(step: _SequenceStep, canvas: Canvas, columns: list[int], y: int) -> None:
    centre = (columns[step.first] + columns[step.last]) // 2
    half = max(cell_len(step.text) // 2 + 1, columns[step.last] - centre + 1)
    half = min(half, centre)
    canvas.put(centre - half, y, f"┌{'─' * (2 * half - 1)}┐")
    canvas.put(centre - half, y + 1, f"│{_centred(step.text, 2 * half - 1)}│")
    canvas.put(centre - half, y + 2, f"└{'─' * (2 * half - 1)}┘")


def _draw_message(step: _SequenceStep, canvas: Canvas, columns: list[int], y: int) -> None:
    left = min(columns[step.first], columns[step.last])
    right = max(columns[step.first], columns[step.last])
    room = right - left - 1
    canvas.put(left + 1 + (room - cell_len(step.text)) // 2, y, step.text)
    line = "┄" if "--" in step.kind else "─"
    head = "×" if step.kind.endswith("x") else "►"
    if step.first < step.last:
        canvas.put(left, y + 1, f"├{line * (room - 1)}{head}")
        if step.kind.startswith("<<"):
            canvas.put(left + 1, y + 1, "◄")
    else:
        head = head.replace("►", "◄")
        canvas.put(left + 1, y + 1, f"{head}{line * (room - 1)}┤")
        if step.kind.startswith("<<"):
            canvas.put(right - 1, y + 1, "►")


def _height(step: _SequenceStep) -> int:
    return {"block": 1, "note": 3}.get(step.kind, 2)


def _half(name: str) -> int:
    """Half of the width of a participant's box."""
    return (cell_len(name) + 1) // 2 + 2


def _centred(text: str, width: int) -> str:
    free = width - cell_len(text)
    return " " * (free // 2) + text + " " * (free - free // 2)


def _plain(text: str) -> str:
    """A text on one line."""
    text = re.sub(r"<br\s*/?>|\\n", " ", text.strip().strip('"'))
    return printable(html.unescape(text))
