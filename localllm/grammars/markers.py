"""Finds markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

# A marker directly after one of these characters is mentioned, not used.
QUOTES = "`\"'“‘«"
NOT_QUOTED = rf"(?:\A|[^{QUOTES}])"


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """The position of the first marker, and the marker. The longest wins at the same position."""
    candidates = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    if not candidates:
        return len(text), None
    position, _, first = min(candidates)
    return position, first


def longer_may_come(text: str, marker: str, markers: Sequence[str]) -> bool:
    """True if `text`, which begins with `marker`, may still become a longer marker."""
    return any(len(m) > len(marker) and m.startswith(text) for m in markers)


def partial_marker(text: str, markers: Sequence[str]) -> int:
    """Length of the longest tail of `text` that begins some marker."""
    longest = max((len(m) for m in markers), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        tail = text[-n:]
        if any(m.startswith(tail) for m in markers):
            return n
    return 0


def may_begin_with(text: str, marker: str) -> bool:
    """True if `text`, apart from leading white space, begins with `marker` or may still do so."""
    text = text.lstrip()
    return text.startswith(marker) or marker.startswith(text)
