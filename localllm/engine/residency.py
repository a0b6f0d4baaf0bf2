"""Where each prefix's KV is, and how a new request gets the longest one: live, resident, or exported.

live      a running request's sequence: shared by forking, which costs nothing
resident  a finished request's sequence, still in the context: taken over whole, which costs nothing either
exported  blocks in the prefix cache (memory, disk): imported by copying

A finished sequence is exported piece by piece between steps and stays resident only while nobody else runs: every
token resident in a unified KV cache slows every other sequence down (12,000 idle ones by 30 %).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from localllm.engine.job import Job
from localllm.engine.prefix_cache import Block, Match, MemoryBlock, PrefixCache, Tokens, as_tokens, common_prefix
from localllm_backends.contract import Backend, BackendFailure, CannotRewindError, NoCellsError

# Large enough that a block's own overhead vanishes, small enough that one export is a fraction of a step.
_PIECE_TOKENS = 512
# Copying fewer tokens than this back is no faster than computing them.
_MIN_TOKENS = 16

MakeBlock = Callable[[Tokens, bytes, int, int], Block]


@dataclass(eq=False)
class Resident:
    """A finished line still in the context; its first `exported` tokens are also in the prefix cache."""

    sequence: int
    tokens: Tokens
    exported: int = 0
    broken: bool = False

    @property
    def done(self) -> bool:
        """Nothing left to export."""
        return self.broken or self.exported >= len(self.tokens)


@dataclass(frozen=True)
class Source:
    """Where a prompt's first `length` tokens can come from. `known` is how far the prompt followed any known line."""

    kind: Literal["none", "live", "resident", "exported"]
    length: int
    known: int
    resident: Resident | None = None
    sequence: int | None = None
    match: Match | None = None


# For a request that takes nothing from others.
NOWHERE = Source("none", 0, 0, match=Match(0, (), 0, None))


@dataclass(frozen=True)
class Taken:
    """A sequence for a request: `held` tokens of its prompt are in it, `rest` is still to be imported (None: nothing)."""

    sequence: int
    held: int
    rest: Restoring | None = None

    def at_once(self) -> tuple[int, int]:
        """(sequence, tokens held) after importing all of it."""
        if self.rest is None:
            return self.sequence, self.held
        while not self.rest.done:
            self.rest.step()
        return self.sequence, self.rest.held


def plain_block(_tokens: Tokens, data: bytes, start: int, stop: int) -> Block:
    """A block that lives in memory only."""
    return MemoryBlock(data, start, stop)


class Restoring:
    """A cached prefix on its way into the empty `sequence`, block by block. Its blocks stay in the cache until it is done
    or closed. Fails silently: what can't be had is a miss."""

    def __init__(self, residency: Residency, backend: Backend, sequence: int, match: Match, most: int) -> None:
        self._residency, self._backend = residency, backend
        self._sequence, self._match, self._most = sequence, match, most
        self._parts = list(reversed(match.parts))
        self.held = 0
        self.done = False
        residency.cache.lock(match)
        if not self._parts:
            self.close()

    def step(self) -> int:
        """Import one block; returns the tokens held."""
        block, start, stop = self._parts.pop()
        before, stop = self.held, min(stop, self._most)
        try:
            if not self._residency.worth_reading(block, stop - start):
                self._parts.clear()
            elif (data := block.read()) is None:
                self._lose(block)
            else:
                self._backend.import_range(self._sequence, data, start, stop)
                self.held = stop
        except NoCellsError:
            # Less room than was promised: what is restored so far is still right.
            self._parts.clear()
        except BackendFailure:
            # A block this build can't read is a miss.
            self._backend.truncate(self._sequence, self.held)
            self._lose(block)
        self._residency.restored_tokens += self.held - before
        if not self._parts:
            self.close()
        return self.held

    def _lose(self, block: Block) -> None:
        self._parts.clear()
        self.close()
        self._residency.lost_blocks += 1
        self._residency.cache.forget(block)

    def close(self) -> None:
        """Let go of the blocks; what is held stays."""
        if not self.done:
            self.done = True
            self._residency.cache.unlock(self._match)


class Residency:
    """Owns every sequence that no running job owns, and the prefix cache."""

    def __init__(self, backend: Backend, cache: PrefixCache, make_block: MakeBlock = plain_block) -> None:
        self._backend = backend
        self.cache = cache
        self._make_block = make_block
        self._residents: list[Resident] = []
        self.worth_reading: Callable[[Block, int], bool] = lambda _block, _n_tokens: True
        self.restored_tokens = 0
        self.lost_blocks = 0

    # --- finding -------------------------------------------------------------------------------------------------

    def lookup(self, prompt: Tokens, live: Iterable[Job]) -> Source:
        """The best source for `prompt`. One token is always left to compute: its logits are needed."""
        most = len(prompt) - 1
        best = Source("none", 0, 0)
        match = self.cache.match(prompt[:most])
        known = match.diverged_at
        if match.length >= _MIN_TOKENS:
            best = Source("exported", match.length, known, match=match)
        for job in live:
            if job.sequence is None:
                continue
            shared = min(most, common_prefix(as_tokens(job.tokens[: job.n_kv]), prompt))
            known = max(known, shared)
            if shared > best.length and (self._can_split or shared == job.n_kv):
                best = Source("live", shared, known, sequence=job.sequence)
        for resident in self._residents:
            shared = min(most, common_prefix(resident.tokens, prompt))
            known = max(known, shared)
            if shared >= max(best.length, 1):
                best = Source("resident", shared, known, resident=resident)
        return Source(best.kind, best.length, known, best.resident, best.sequence, best.match)

    @property
    def _can_split(self) -> bool:
        return self._backend.capabilities.rewind == "any"

    def needs_cells(self, source: Source, n_tokens: int) -> int:
        """Free cells needed to hold `n_tokens` of which `source` brings its share."""
        return n_tokens - (source.length if source.kind in ("live", "resident") else 0)

    # --- taking --------------------------------------------------------------------------------------------------

    def take(self, source: Source, prompt: Tokens) -> Taken:
        """A sequence that holds as much of `prompt` as `source` gives, now or once its `rest` is imported. Falls back to
        what the cache has, then to an empty sequence; raises NoCellsError when there is no sequence left."""
        if source.kind == "resident" and source.resident is not None:
            taken = self._take_resident(source.resident, source.length)
            if taken is not None:
                return Taken(taken, source.length)
        if source.kind == "live" and source.sequence is not None:
            try:
                return Taken(self._backend.fork(source.sequence, source.length), source.length)
            except CannotRewindError:
                pass
        match = source.match or self.cache.match(prompt[:-1])
        sequence = self._backend.new_sequence()
        return Taken(sequence, 0, Restoring(self, self._backend, sequence, match, len(prompt) - 1))

    def _take_resident(self, resident: Resident, length: int) -> int | None:
        if length < len(resident.tokens) and not resident.done:
            if self._can_split:
                return self._backend.fork(resident.sequence, length)
            self._export_next(resident)
        try:
            self._backend.truncate(resident.sequence, length)
        except CannotRewindError:
            return None
        self._residents.remove(resident)
        return resident.sequence

    # --- giving back ---------------------------------------------------------------------------------------------

    def release(self, sequence: int, tokens: Tokens, *, keep: bool = True) -> None:
        """A job is done with `sequence`, which holds `tokens`. Kept as resident unless too short or unwanted."""
        if not keep or len(tokens) < _MIN_TOKENS:
            self._backend.drop(sequence)
            return
        self._residents.append(Resident(sequence, tokens.copy(), exported=self._covered(tokens)))

    def park(self, sequence: int, tokens: Tokens) -> None:
        """Take a running job out of the context at once, keeping its KV in the cache."""
        resident = Resident(sequence, tokens.copy(), exported=self._covered(tokens))
        while not resident.done:
            self._export_next(resident)
        self._backend.drop(sequence)

    def checkpoint(self, sequence: int, tokens: Tokens) -> None:
        """Store the state after exactly `tokens`, for models that can't go back there later."""
        if self.cache.whole and self.cache.match(tokens).length < len(tokens):
            self._store(sequence, tokens, 0, len(tokens))

    def tick(self, *, busy: bool) -> bool:
        """Export one piece of one resident, if any is left; drop exported ones while others run.

        Returns True while there is more to do without new requests."""
        for resident in self._residents:
            if not resident.done:
                self._export_next(resident)
                break
        if busy:
            for resident in [r for r in self._residents if r.done]:
                self._drop(resident)
        elif len(self._residents) > 1:
            # One stays for the next turn of the chat just answered; the others are in the cache.
            for resident in [r for r in self._residents[:-1] if r.done]:
                self._drop(resident)
        return any(not r.done for r in self._residents) or len(self._residents) > 1

    def make_room(self, cells: int, *, live: int, keep: Resident | None = None) -> bool:
        """Drop residents (exporting them first) until `cells` are free and one more sequence than `live` fits."""
        for resident in list(self._residents):
            if self._has_room(cells, live):
                return True
            if resident is not keep:
                while not resident.done:
                    self._export_next(resident)
                self._drop(resident)
        return self._has_room(cells, live)

    def _has_room(self, cells: int, live: int) -> bool:
        return self._backend.cells_free() >= cells and live + len(self._residents) <= self._backend.info.n_seq_max

    @property
    def residents(self) -> int:
        """Finished sequences still in the context."""
        return len(self._residents)

    def _drop(self, resident: Resident) -> None:
        self._residents.remove(resident)
        self._backend.drop(resident.sequence)

    def _covered(self, tokens: Tokens) -> int:
        covered = self.cache.covered(tokens)
        return covered if not self.cache.whole or covered == len(tokens) else 0

    def _export_next(self, resident: Resident) -> None:
        total = len(resident.tokens)
        start = 0 if self.cache.whole else resident.exported
        stop = total if self.cache.whole else min(total, start + _PIECE_TOKENS)
        line = resident.tokens[:stop]
        if self._store(resident.sequence, line, start, stop) or self.cache.covered(line) >= stop:
            resident.exported = stop
        else:
            resident.broken = True

    def _store(self, sequence: int, tokens: Tokens, start: int, stop: int) -> bool:
        try:
            data = self._backend.export_range(sequence, start, stop)
        except BackendFailure:
            return False
        return self.cache.insert(tokens, self._make_block(tokens, data, start, stop))
