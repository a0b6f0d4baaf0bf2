"""Does it fit: the one verdict, over every place that bytes are needed of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Fits = Literal["yes", "tight", "split", "no"]

# A plan this close to the limit leaves nothing for a longer prompt's buffers or another program:
# "tight".
TIGHT_SHARE = 0.93
TIGHT_MEANS = f"needs more than is free now, or over {TIGHT_SHARE:.0%} of what may be loaded"


@dataclass(frozen=True, slots=True)
class Part:
    """What is needed of one place, in bytes: `limit_bytes` is the most that may be taken of it,
    `free_bytes` what of that is free now, `roomy_bytes` what leaves some of it for longer prompts'
    buffers and other programs (None: as much as is free)."""

    place: str
    needs_bytes: int
    limit_bytes: int
    free_bytes: int
    roomy_bytes: int | None = None

    @property
    def is_tight(self) -> bool:
        """True where others would have to give way, or nearly nothing would be left."""
        is_roomy = self.roomy_bytes is None or self.needs_bytes <= self.roomy_bytes
        return self.needs_bytes > self.free_bytes or not is_roomy


@dataclass(frozen=True, slots=True)
class Verdict:
    """`yes`; `tight` (needs more than is free now, or nearly all of what may be loaded); `split`
    (as "yes", with a part in system memory); `no`. `parts` are those that it was judged by."""

    fits: Fits
    parts: tuple[Part, ...]

    @property
    def lacking(self) -> tuple[Part, ...]:
        """The places that have too little: why it is "no"."""
        return tuple(part for part in self.parts if part.needs_bytes > part.limit_bytes)


def has_room(needs_bytes: int, free_bytes: int) -> bool:
    """Whether a place that has `free_bytes` now has room for `needs_bytes`."""
    return needs_bytes <= free_bytes


def verdict(parts: Sequence[Part], *, split: bool = False) -> Verdict:
    """Whether every place has room for its part. `split`: a part of it is in system memory by
    choice."""
    judged = Verdict("split" if split else "yes", tuple(parts))
    if judged.lacking:
        return replace(judged, fits="no")
    if not split and any(part.is_tight for part in judged.parts):
        return replace(judged, fits="tight")
    return judged
