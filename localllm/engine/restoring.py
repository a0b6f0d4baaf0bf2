"""A cached prefix on its way back into the context: what of it to take, and taking it piece by piece.

Each piece is weighed by itself, since they cost and save apart from each other: one in memory costs next to nothing; one
on disk is worth reading when that is quicker than computing the tokens wanted of it. What is not worth reading, was
evicted or turns out to be lost is a gap: its tokens are computed, and what lies behind it is still taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from localllm.engine.prefix_cache import Block, CachedPart, Match, PrefixCache, Tokens
from localllm_backends.contract import Backend, BackendFailure, NoCellsError

# Is reading this block quicker than computing so many of its tokens?
Worth = Callable[[Block, int], bool]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The `parts` of a prompt to import, in order; `unread` tokens are held too, on disk, and quicker computed."""

    match: Match
    parts: tuple[CachedPart, ...]
    unread: int = 0

    @property
    def saved(self) -> int:
        """Tokens that need not be computed."""
        return sum(part.n_tokens for part in self.parts)


def plan(cache: PrefixCache, prompt: Tokens, worth: Worth) -> RestorePlan:
    """What to take of all that `cache` holds of `prompt`."""
    match = cache.peek(prompt)
    if cache.whole:
        # Only one snapshot can be taken: the longest that is worth it.
        unread = match.saved
        while match.parts and not worth(match.parts[0].block, match.saved):
            match = cache.peek(prompt[: match.saved - 1])
        return RestorePlan(match, match.parts, unread - match.saved)
    parts = tuple(part for part in match.parts if worth(part.block, part.n_tokens))
    return RestorePlan(match, parts, match.saved - sum(part.n_tokens for part in parts))


class Keeper(Protocol):
    """Who owns the cache, as far as a restoration needs it."""

    cache: PrefixCache

    def plan(self, prompt: Tokens) -> RestorePlan:
        """What to take of what the cache holds of `prompt`."""
        ...

    def store(self, sequence: int, tokens: Tokens, start: int) -> None:
        """Put what `sequence` holds of `tokens` from `start` on into the cache, if there is room."""
        ...

    def lost(self, block: Block) -> None:
        """A block could not be read or imported."""
        ...


@dataclass
class Restoring:
    """A prompt's cached parts being imported into the empty `sequence`. Its blocks stay in the cache until it is `done` or
    closed. `held` tokens are in the sequence, `imported` of them from the cache. Fails silently: what can't be had is
    computed, and counted by reason in `missed`."""

    keeper: Keeper
    backend: Backend
    sequence: int
    prompt: Tokens
    plan: RestorePlan
    held: int = 0
    imported: int = 0
    done: bool = False
    missed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts = list(reversed(self.plan.parts))
        self._gap_start = 0
        self._lock(self.plan.match)
        self._miss("unread", self.plan.unread)
        if not self._parts:
            self.close()

    @property
    def computes_to(self) -> int | None:
        """Where the gap ends that must be computed before the next part can be imported; None when none is due."""
        return self._parts[-1].start if self._parts and self._parts[-1].start > self.held else None

    def step(self) -> None:
        """Import the next part, which must follow what is held."""
        part = self._parts.pop()
        assert part.start == self.held, "a gap must be computed first"
        try:
            in_memory = part.block.held_bytes > 0
            data = part.block.read()
            if data is None:
                self._lose(part)
            else:
                self.backend.import_range(self.sequence, data, part.start, part.stop)
                self.held = self._gap_start = part.stop
                self.imported += part.n_tokens
                if not in_memory:
                    self.keeper.cache.promote(part.block, data)
        except NoCellsError:
            # Less room than was promised: what is restored so far is still right.
            self._miss("no_cells", part.n_tokens + sum(p.n_tokens for p in self._parts))
            self._parts.clear()
        except BackendFailure:
            # A block this build can't read is a miss.
            self.backend.truncate(self.sequence, self.held)
            self._lose(part)
        if not self._parts:
            self.close()

    def computed(self, held: int) -> None:
        """The sequence holds `held` tokens now. A gap that is filled goes to the cache as a block of its own."""
        self.held = held
        if self.computes_to is None and self._parts:
            self.keeper.store(self.sequence, self.prompt[:held], self._gap_start)

    def close(self) -> None:
        """Let go of the blocks; what is held stays."""
        if not self.done:
            self.done = True
            self.keeper.cache.unlock(self.plan.match)

    def _lock(self, match: Match) -> None:
        self.keeper.cache.lock(match)

    def _lose(self, part: CachedPart) -> None:
        self.keeper.lost(part.block)
        if not self.keeper.cache.whole:
            self._miss("lost", part.n_tokens)
            return
        # The next longest snapshot, if there is one.
        held, self.plan = self.plan, self.keeper.plan(self.prompt)
        self._lock(self.plan.match)
        self.keeper.cache.unlock(held.match)
        self._parts = list(reversed(self.plan.parts))
        self._miss("lost", part.n_tokens - self.plan.saved)

    def _miss(self, reason: str, n_tokens: int) -> None:
        if n_tokens > 0:
            self.missed[reason] = self.missed.get(reason, 0) + n_tokens
