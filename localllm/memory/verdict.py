"""Decide whether a plan fits in all memory pools that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Fits = Literal["yes", "tight", "split", "no"]

# A plan this close to the limit is "tight": it has no room for a longer prompt's buffers or another
# program.
TIGHT_SHARE = 0.93
TIGHT_MEANS = (
    f"needs more memory than is free now, or over {TIGHT_SHARE:.0%} of the loadable memory"
)


class Part(NamedTuple):
    """Requirements for one memory pool, in bytes.

    `limit_bytes`: the most that may be used.
    `free_bytes`: the part of the limit that is free now.
    `roomy_bytes`: the most that leaves room for longer prompts' buffers and other programs (None:
    no such limit).
    """

    place: str
    needs_bytes: int
    limit_bytes: int
    free_bytes: int
    roomy_bytes: int | None = None

    @property
    def is_tight(self) -> bool:
        """True if other programs would have to release memory, or if nearly no memory would be
        left."""
        is_roomy = self.roomy_bytes is None or self.needs_bytes <= self.roomy_bytes
        return self.needs_bytes > self.free_bytes or not is_roomy


class Verdict(NamedTuple):
    """Whether a plan fits, and the parts on which the verdict is based.

    `yes`: it fits.
    `tight`: it needs more than is free now, or nearly all of the limit.
    `split`: it fits, with a part in system memory.
    `no`: it needs more than a limit.
    """

    fits: Fits
    parts: tuple[Part, ...]

    @property
    def short_parts(self) -> tuple[Part, ...]:
        """The pools that have too little memory: the reason for "no"."""
        return tuple(part for part in self.parts if part.needs_bytes > part.limit_bytes)


def has_room(needs_bytes: int, free_bytes: int) -> bool:
    """True if a pool with `free_bytes` has room for `needs_bytes`."""
    return needs_bytes <= free_bytes


def verdict(parts: Sequence[Part], *, split: bool = False) -> Verdict:
    """Judge whether every pool has room for its part. `split`: the plan puts a part into system
    memory."""
    judged = Verdict("split" if split else "yes", tuple(parts))
    if judged.short_parts:
        return judged._replace(fits="no")
    if not split and any(part.is_tight for part in judged.parts):
        return judged._replace(fits="tight")
    return judged
