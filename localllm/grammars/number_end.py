"""Numbers with an end: in llguidance's grammar of JSON the digits of one go on for ever."""

from __future__ import annotations

from collections.abc import Sequence

# A float of 64 bits is written in 17 digits, its zeros aside, an integer in 20; some are longer.
_MOST_DIGITS = 24
_DIGITS = b"0123456789"


class NumberEnd:
    """Of a vocabulary: which tokens make a number longer. Masks have a bit for each token, the
    lowest first."""

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._spellings = spellings
        self._digits = sum(1 << t for t, text in enumerate(spellings) if text[:1].isdigit())
        self._quotes = sum(1 << t for t, text in enumerate(spellings) if text == b'"')

    def digits_behind(self, token: int, digits: int) -> int:
        """How many digits a text ends with, after `token` behind `digits` of them."""
        spelling = self._spellings[token]
        tail = len(spelling) - len(spelling.rstrip(_DIGITS))
        if tail == len(spelling):
            return digits + tail
        return tail

    def ended(self, mask: bytes, digits: int) -> bytes:
        """The mask of what may follow so many digits: no more of them where a number may end. A
        text between quotes, which one may close, goes on."""
        if digits < _MOST_DIGITS:
            return mask
        allowed = int.from_bytes(mask, "little")
        rest = allowed & ~self._digits
        if allowed & self._quotes or not rest:
            return mask
        return rest.to_bytes(len(mask), "little")
