"""Rows of a formula's parts: the gaps between them, and their superscripts and subscripts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm_tui.widgets.boxes import EMPTY, Box, Kind, above, flat, in_row, is_operand
from localllm_tui.widgets.latex_signs import in_script, stacks

_BEFORE_OPERAND = ("open", "rel", "bin", "infix", "punct", "sign", "op")
_SPACED = ("rel", "bin")
_OPERAND_BEFORE = ("ord", "close", "frac", "row")
_OPERAND_AFTER = ("ord", "open", "frac", "row", "op")
_OPENING = "([{⟨⌊⌈⟦⎛⎡"
_CLOSING = ")]}⟩⌋⌉⟧"
# A root of one sign, which the next operand does not belong to.
_SHORT_ROOT = re.compile(r"√(\w|\d+)$")


def scripted(nucleus: Box, scripts: Sequence[tuple[str, Box]], *, displayed: bool) -> Box:
    """`nucleus` with its superscripts and subscripts."""
    if not scripts:
        return nucleus
    small = [in_script(script.text, mark) for mark, script in scripts]
    if displayed and (not all(small) or not nucleus.flat):
        return _raised(nucleus, scripts)
    text = nucleus.text
    if nucleus.kind in ("frac", "row") and not is_operand(text):
        text = f"({text})"
    for (mark, script), short in zip(scripts, small, strict=True):
        is_single = len(script.text) == 1 or script.kind == "text"
        text += short or (f"{mark}{script.text}" if is_single else f"{mark}({script.text})")
    kind: Kind = nucleus.kind
    if kind in ("frac", "row", "text"):
        kind = "ord"
    return Box((text,), kind=kind, limits=nucleus.limits)


def _raised(nucleus: Box, scripts: Sequence[tuple[str, Box]]) -> Box:
    """`nucleus` with its scripts on the lines above and below it."""
    highs = [box for mark, box in scripts if mark == "^"]
    lows = [box for mark, box in scripts if mark == "_"]
    if nucleus.limits:
        boxes = [*highs, nucleus, *lows]
        return above(boxes, len(highs), nucleus.kind)
    if not nucleus.flat:
        highs = _small(highs, "^")
        lows = _small(lows, "_")
    height = len(nucleus.lines)
    # next to a high bracket the scripts are on its first and last line
    room = min(height - 1, 1)
    lines = [""] * height
    base = nucleus.base
    if highs:
        lines = [in_row(highs).text, *lines[room:]]
        base += 1 - room
    if lows:
        lines = [*lines[: len(lines) - room], in_row(lows).text]
    column = Box(tuple(lines), base)
    kind = nucleus.kind
    if kind == "row":
        kind = "ord"
    return in_row([nucleus, column], kind)


def _small(scripts: Sequence[Box], mark: str) -> list[Box]:
    return [flat(in_script(script.text, mark) or script.text) for script in scripts]


def assembled(parts: Sequence[Box], spaces: Sequence[str]) -> Box:
    """The parts of a row, with the gaps that their kinds need."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return EMPTY
    kinds = _kinds(parts)
    boxes: list[Box] = []
    for n, part in enumerate(parts):
        if n and _has_gap(parts, kinds, spaces, n):
            boxes.append(flat(" "))
        if kinds[n] == "frac" and part.flat and _has_operands(parts, kinds, n):
            part = flat(f"({part.text})")
        boxes.append(part)
    return in_row(boxes)


def _has_operands(parts: Sequence[Box], kinds: Sequence[Kind], n: int) -> bool:
    """True if part `n` is multiplied by the one before or after it, or is a function's argument."""
    if n and (kinds[n - 1] in _OPERAND_BEFORE or _is_function(parts[n - 1])):
        return True
    if n + 1 == len(parts):
        return False
    after = parts[n + 1].lines[0]
    bracketed = kinds[n + 1] == "close" and (after[:1] in _OPENING or after == "!")
    return bracketed or kinds[n + 1] in _OPERAND_AFTER


def _is_function(part: Box) -> bool:
    return part.kind == "op" and not part.limits and part.lines[0][:1].isalpha()


def _kinds(parts: Sequence[Box]) -> list[Kind]:
    """The kinds of the parts: an operator without an operand before it is a sign."""
    kinds: list[Kind] = []
    for part in parts:
        kind = part.kind
        if kind in ("bin", "infix") and (not kinds or kinds[-1] in _BEFORE_OPERAND):
            kind = "sign"
        kinds.append(kind)
    return kinds


def _has_gap(parts: Sequence[Box], kinds: Sequence[Kind], spaces: Sequence[str], n: int) -> bool:
    """True if there is a gap before part `n`."""
    before = kinds[n - 1]
    kind = kinds[n]
    if not parts[n - 1].flat or not parts[n].flat:
        return (
            before not in ("sign", "open")
            and kind != "punct"
            and not _is_bracket_end(parts[n], kind)
        )
    if before in _SPACED or kind in _SPACED:
        return not _are_apart(parts[n - 1], parts[n])
    if before == "open" or _closes(parts[n], kind) or _are_apart(parts[n - 1], parts[n]):
        return False
    return _has_optional_gap(parts, kinds, spaces, n)


def _are_apart(before: Box, part: Box) -> bool:
    """True if there is a space already."""
    return before.text.endswith(" ") or part.text.startswith(" ")


def _has_optional_gap(
    parts: Sequence[Box], kinds: Sequence[Kind], spaces: Sequence[str], n: int
) -> bool:
    """True if there is a gap because of how part `n` or the one before was written."""
    before = kinds[n - 1]
    kind = kinds[n]
    for at in (n, n - 1):
        if kinds[at] in ("infix", "bar"):
            return _is_spaced(parts, spaces, at)
    if kind in ("ord", "frac", "row") and _SHORT_ROOT.search(parts[n - 1].text):
        return True
    if before == "op":
        return _has_gap_after_function(parts[n - 1], parts[n], kind)
    if kind == "op":
        return before not in ("sign", "punct") or bool(spaces[n])
    return spaces[n] == "hard"


def _is_spaced(parts: Sequence[Box], spaces: Sequence[str], at: int) -> bool:
    """True if an operator such as + has gaps on both sides: as written, or if an operand is high."""
    if at + 1 == len(parts):
        return False
    if at and parts[at].kind == "infix" and not (parts[at - 1].flat and parts[at + 1].flat):
        return True
    return bool(spaces[at] and spaces[at + 1])


def _has_gap_after_function(function: Box, operand: Box, kind: Kind) -> bool:
    if function.limits and not stacks(function.text):
        return True  # it has scripts
    return kind not in ("open", "sign") and not _is_call(operand)


def _closes(part: Box, kind: Kind) -> bool:
    """True for a closing bracket or a comma."""
    if _is_bracket_end(part, kind):
        return True
    return kind in ("close", "punct") and part.flat and len(part.text) == 1 and part.text != ":"


def _is_bracket_end(part: Box, kind: Kind) -> bool:
    """True for a closing bracket, with its scripts."""
    if kind != "close":
        return False
    line = part.lines[part.base]
    return line[:1] in _CLOSING or (line[:1] in "|‖" and line.count(line[0]) == 1)


def _is_call(part: Box) -> bool:
    """True for a part in brackets."""
    return part.kind == "close" and part.lines[0][:1] in ("(", "[", "⎛", "⎡")
