"""The bounds of characters as people see them: an emoji of seven code points is one character, and
so is a flag."""

from __future__ import annotations

# A line may be long; no single character is.
_LOOK_CHARS = 128


def before(text: str, at: int) -> int:
    """The index at which the character begins that ends at `at` or contains it; 0 at the
    beginning."""
    if at < 2 or text[at - 2 : at].isascii():
        return max(0, at - 1)
    start = max(0, at - _LOOK_CHARS)
    return max((begin for begin, _ in _characters(text, start) if begin < at), default=0)


def after(text: str, at: int) -> int:
    """The index at which the character ends that begins at `at`; the length of the text at its
    end."""
    if text[at : at + 2].isascii():
        return min(len(text), at + 1)
    return next((end for _, end in _characters(text, at)), len(text))


def _characters(text: str, start: int) -> list[tuple[int, int]]:
    import regex  # ASCII input needs no Unicode tables

    return [
        found.span()
        for found in regex.finditer(r"\X", text, pos=start, endpos=start + 2 * _LOOK_CHARS)
    ]
