"""Ends numbers: in llguidance's JSON grammar, a number may have unlimited digits."""

from __future__ import annotations

from collections.abc import Sequence

# A 64-bit float needs 17 digits, not counting zeros, and a 64-bit integer 20. Some are longer.
_MAX_DIGITS = 24
_DIGITS = b"0123456789"


class NumberEnd:
    """Knows which tokens of a vocabulary extend a number.

    Masks have one bit per token, lowest first.
    """

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._spellings = spellings
        self._digits = sum(1 << t for t, text in enumerate(spellings) if text[:1].isdigit())
        self._quotes = sum(1 << t for t, text in enumerate(spellings) if text == b'"')

    def digits_at_end(self, token: int, digits: int) -> int:
        """The number of digits at the end of a text, after `token` was appended to `digits`
        digits."""
        spelling = self._spellings[token]
        n_trailing = len(spelling) - len(spelling.rstrip(_DIGITS))
        if n_trailing == len(spelling):
            return digits + n_trailing
        return n_trailing

    def ended(self, mask: bytes, digits: int) -> bytes:
        """The mask of the tokens that may follow this many digits.

        At the limit, further digits are excluded if the number may end. In a quoted text, in which
        a quote is allowed next, digits may continue.
        """
        if digits < _MAX_DIGITS:
            return mask
        allowed = int.from_bytes(mask, "little")
        without_digits = allowed & ~self._digits
        if allowed & self._quotes or not without_digits:
            return mask
        return without_digits.to_bytes(len(mask), "little")
