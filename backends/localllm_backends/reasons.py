"""Why something can't be had: tables of what would be in its way, in words."""

from __future__ import annotations

from collections.abc import Iterable


def first_reason(table: Iterable[tuple[object, str]]) -> str:
    """The sentence of the first row whose condition holds; "" if none does."""
    return next((sentence for holds, sentence in table if holds), "")
