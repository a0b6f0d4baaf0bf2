"""Where each prefix's KV is, and how a new request gets the longest one: live, resident, or exported.

live      a running request's sequence: shared by forking, which costs nothing where forks share cells
resident  a finished request's sequence, still in the context: taken over whole, which costs nothing either
exported  blocks in the prefix cache (memory, disk): imported by copying

A finished sequence is exported piece by piece between steps and, once all of it is exported, stays resident only until
somebody else comes: every token resident in a unified KV cache slows every other sequence down (12,000 idle ones by 30 %).
One that could not be exported (yet) stays as long as nobody needs its cells: that costs speed, dropping it costs a prefill.

Where KV lies on a device, reading it out is what costs: there every line stays while there are cells and sequences for it,
and is exported between requests, or, once they run short, bit by bit between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from localllm.engine.cache.block import Block
from localllm.engine.cache.budget import Room
from localllm.engine.cache.checkpoints import Signs, checkpoints
from localllm.engine.cache.matching import Matching, RunningLine
from localllm.engine.cache.restore import RestorePlan, Restoring
from localllm.engine.cache.store import MIN_TOKENS, KvStore
from localllm.engine.cache.tree import Match, PrefixCache
from localllm.engine.tokens import Tokens, edge
from localllm_backends.contract import Backend, BackendFailure, CannotRewindError, NoCellsError

_STATES: dict[Room, ResidentState] = {"now": "exporting", "later": "awaiting", "never": "refused"}
# So many tokens to compute again outweigh the copy of a state.
_WORTH_A_STATE = 64
# Closing waits this long for the writer to make room for what is not exported yet.
_CLOSE_S = 10.0
# On a device lines are exported beside running requests once no more than this part of the cells is free.
_FEW_CELLS = 0.25

# Exporting: there is more of it to export. Awaiting: there is room for that once what is in memory is written. Refused:
# there is no room. Exported: all of it is in the cache.
ResidentState = Literal["exporting", "awaiting", "refused", "exported"]


@dataclass(eq=False)
class Resident:
    """A finished line still in the context, and how far its export to the prefix cache is: `state`, which held when the
    cache had seen `as_of` changes. `used`: when its request ended, in uses of the cache; it takes no room in the cache from what
    was used since."""

    sequence: int
    tokens: Tokens
    state: ResidentState = "exporting"
    used: int | None = None
    as_of: int | None = None

    @property
    def exported(self) -> bool:
        """All of it is also in the cache."""
        return self.state == "exported"


@dataclass(frozen=True)
class PrefixSource:
    """Where `length` of a prompt's tokens can come from. `known` is how far the prompt followed any known line. `state`: the
    state behind them, where the line that has them can't go back there by itself."""

    kind: Literal["none", "live", "resident", "exported"]
    length: int
    known: int
    resident: Resident | None = None
    sequence: int | None = None
    plan: RestorePlan | None = None
    state: Block | None = None


# For a request that takes nothing from others.
NOWHERE = PrefixSource("none", 0, 0, plan=RestorePlan(Match((), 0, None), ()))


@dataclass(frozen=True)
class Taken:
    """A sequence for a request: `held` tokens of its prompt are in it, `rest` is still to be imported (None: nothing)."""

    sequence: int
    held: int
    rest: Restoring | None = None

    def at_once(self) -> tuple[int, int]:
        """(sequence, tokens held) after importing all of it that comes without computing."""
        if self.rest is None:
            return self.sequence, self.held
        while not self.rest.done and self.rest.computes_to is None:
            self.rest.step()
        self.rest.close()
        return self.sequence, self.rest.held


class SequencePool:
    """Owns every sequence that no running job owns, and what is kept of others in `kv`."""

    def __init__(self, backend: Backend, kv: KvStore) -> None:
        self._backend = backend
        self.kv = kv
        self._stateful = backend if backend.capabilities.states else None
        self._residents: list[Resident] = []
        self.restored_tokens = 0

    @property
    def cache(self) -> PrefixCache:
        """The KV that is kept outside the context."""
        return self.kv.cache

    # --- finding -------------------------------------------------------------------------------------------------

    def lookup(self, prompt: Matching, live: Iterable[RunningLine]) -> PrefixSource:
        """The best source for `prompt`. One token is always left to compute: its logits are needed."""
        self._hear()
        most = len(prompt.tokens) - 1
        plan = prompt.plan(self.kv.as_of(), self.kv.plan)
        best = PrefixSource("none", 0, 0)
        known = plan.known
        if plan.saved >= MIN_TOKENS:
            best = PrefixSource("exported", plan.saved, known, plan=plan)
        for job in live:
            if job.sequence is None:
                continue
            shared = edge(prompt.tokens, min(most, job.n_kv, prompt.shared(job)))
            known = max(known, shared)
            if shared > best.length:
                length, state = self._reaches(job.sequence, shared, job.n_kv, prompt.tokens)
                if length > best.length:
                    best = PrefixSource("live", length, known, sequence=job.sequence, state=state)
        for resident in self._residents:
            shared = edge(prompt.tokens, min(most, prompt.shared(resident)))
            known = max(known, shared)
            if shared >= max(best.length, 1):
                length, state = self._reaches(resident.sequence, shared, len(resident.tokens), prompt.tokens)
                if length >= max(best.length, 1) and self._may_take(resident, length):
                    best = PrefixSource("resident", length, known, resident=resident, state=state)
        return replace(best, known=known)

    def has(self, resident: Resident) -> bool:
        """Is it still in the context?"""
        return resident in self._residents

    def _reaches(self, sequence: int, shared: int, held: int, prompt: Tokens) -> tuple[int, Block | None]:
        """How much of the `shared` tokens of a sequence that holds more a line could take over, and the state it needs for
        that."""
        if shared == held or self._can_split or self._backend.can_rewind(sequence, shared):
            return shared, None
        return self.kv.point(prompt[:shared]) or (0, None)

    @property
    def _can_split(self) -> bool:
        return self._backend.capabilities.rewind == "any"

    def _may_take(self, resident: Resident, length: int) -> bool:
        """A line that can't be forked, and is nowhere else, is not cut to a smaller part of itself."""
        return self._can_split or self._stateful is not None or self._may_cut(resident, length)

    def _may_cut(self, resident: Resident, length: int) -> bool:
        return resident.exported or 2 * length >= len(resident.tokens)

    def needs_cells(self, source: PrefixSource, n_tokens: int) -> int:
        """Free cells needed to hold `n_tokens` of which `source` brings its share: a resident line's own, a live one's
        where forks share cells."""
        brings = source.kind == "resident" or (source.kind == "live" and self._backend.capabilities.shares_cells)
        return n_tokens - (source.length if brings else 0)

    # --- taking --------------------------------------------------------------------------------------------------

    def take(self, source: PrefixSource, prompt: Tokens) -> Taken:
        """A sequence that holds as much of `prompt` as `source` gives, now or once its `rest` is imported. Falls back to
        what the cache has, then to an empty sequence; raises NoCellsError when there is no sequence left."""
        # However it comes back, the line is in use again: its copies in the cache are the last to go.
        if source.kind != "none":
            self.kv.used(prompt[:-1])
        # A new line's cells come behind those in use, and what attention reads ends with the last of them: beside 3,000 idle
        # ones a stream was 15 % slower to its end, also after they had gone.
        self._leave([r for r in self._residents if r is not source.resident])
        if source.kind == "resident" and source.resident is not None:
            taken = self._take_resident(source.resident, source.length, source.state)
            if taken is not None:
                self._mark(taken, source, prompt)
                return Taken(taken, source.length)
        if source.kind == "live" and source.sequence is not None:
            forked = self._fork_line(source.sequence, source.length, source.state)
            if forked is not None:
                self._mark(forked, source, prompt)
                return Taken(forked, source.length)
        plan = source.plan or self.kv.plan(prompt)
        sequence = self._new_sequence(source.resident)
        return Taken(sequence, 0, Restoring(self.kv, self._backend, sequence, prompt, plan))

    def _mark(self, sequence: int, source: PrefixSource, prompt: Tokens) -> None:
        """Where a line left another in the middle of a turn the next one will: keep the state there while it can be had."""
        if self.kv.states is None or source.state is not None:
            return
        point = self.kv.point(prompt[: source.length])
        if source.length - (point[0] if point else 0) > _WORTH_A_STATE:
            self.checkpoint(sequence, prompt[: source.length])

    def _new_sequence(self, in_the_way: Resident | None) -> int:
        try:
            return self._backend.new_sequence()
        except NoCellsError:
            # The resident that was to be taken over could not be cut back: its place is the one that was counted on.
            if in_the_way not in self._residents:
                raise
            self._drop(in_the_way)
            return self._backend.new_sequence()

    def _take_resident(self, resident: Resident, length: int, state: Block | None) -> int | None:
        """Its sequence, cut to `length`, or a fork of it while its end is nowhere else; None where neither can be."""
        if length < len(resident.tokens) and not resident.exported:
            if self._can_split or self._stateful is not None:
                forked = self._fork(resident, length, state)
                if forked is not None:
                    return forked
            if not self._can_split and not self._may_cut(resident, length):
                return None
            self._export_next(resident, force=True)
        if state is not None and not self._cut_to_state(resident, length, state):
            return None
        try:
            self._backend.truncate(resident.sequence, length)
        except CannotRewindError:
            return None
        self._residents.remove(resident)
        return resident.sequence

    def _cut_to_state(self, resident: Resident, length: int, state: Block) -> bool:
        data = state.read()
        try:
            if data is not None and self._stateful is not None:
                self._stateful.import_state(resident.sequence, data, length)
                return True
        except BackendFailure:
            self._drop(resident)
        self.kv.lost(state)
        return False

    def _fork_line(self, sequence: int, length: int, state: Block | None) -> int | None:
        """A fork of a line at `length`; None where it can't be had. Raises NoCellsError where there is no room for it."""
        try:
            if state is None:
                return self._backend.fork(sequence, length)
            data = state.read()
            if data is not None and self._stateful is not None:
                return self._stateful.fork_state(sequence, data, length)
        except NoCellsError:
            raise
        except CannotRewindError:
            return None
        except BackendFailure:
            pass
        if state is not None:
            self.kv.lost(state)
        return None

    def _fork(self, resident: Resident, length: int, state: Block | None) -> int | None:
        """The beginning of a line whose end is still to be exported; None if there is no sequence left for it."""
        others = [r for r in self._residents if r is not resident]
        while True:
            try:
                return self._fork_line(resident.sequence, length, state)
            except NoCellsError:
                if not others:
                    return None
                self._export_all(others[0])
                self._drop(others.pop(0))

    # --- giving back ---------------------------------------------------------------------------------------------

    def cut(self, sequence: int, n_tokens: int) -> None:
        """Let go of all but the first `n_tokens` of a job's sequence; CannotRewindError where that can't be."""
        self._backend.truncate(sequence, n_tokens)

    def release(self, sequence: int, tokens: Tokens, *, keep: bool = True) -> None:
        """A job is done with `sequence`, which holds `tokens`. Kept as resident unless too short or unwanted."""
        if not keep or len(tokens) < MIN_TOKENS:
            self._backend.drop(sequence)
            return
        self.kv.used(tokens)
        state: ResidentState = "exporting" if self.kv.lacks(tokens) is not None else "exported"
        self._residents.append(Resident(sequence, tokens.copy(), state, self.kv.budget.uses))

    def park(self, sequence: int, tokens: Tokens) -> None:
        """Take a running job out of the context at once, keeping its KV in the cache."""
        self._export_all(Resident(sequence, tokens.copy()))
        self._backend.drop(sequence)

    def checkpoint(self, sequence: int, tokens: Tokens) -> None:
        """Store the state after exactly `tokens`, for models that can't go back there later."""
        if self.kv.states is not None and self.kv.states.gap(tokens) is not None:
            self.kv.store_state(sequence, tokens, newer=True)
        elif self.cache.whole and self.cache.gap(tokens) is not None:
            self.kv.store(sequence, tokens, 0, newer=True)

    def checkpoints(self, job: RunningLine) -> list[int]:
        """Where in its prompt `checkpoint` is to be called for a job."""
        if not self.kv.has_points or not job.shares:
            return []
        apart = self.kv.apart(job.n_prompt) if self.kv.states is not None else None
        signs = Signs(self._is_control, self._ends_paragraph)
        found = checkpoints(job.tokens[: job.n_prompt], job.n_kv, job.known, signs, apart)
        return sorted({e for e in (edge(job.tokens, point) for point in found) if e > job.n_kv})

    def _is_control(self, token: int) -> bool:
        return token >= 0 and self._backend.is_control(token)

    def _ends_paragraph(self, token: int) -> bool:
        return token >= 0 and self._backend.token_bytes(token).endswith(b"\n\n")

    def tick(self, *, busy: bool, live: int = 0) -> bool:
        """Export one piece of one resident, if any can be; drop exported ones while others run, `live` of them.

        Returns True while there is more to do without new requests and without waiting for the disk."""
        self._hear()
        if not (busy and self._stays(live)):
            for resident in self._residents:
                if not resident.exported and self._export_next(resident):
                    break
        self.kv.hurry(self.waiting)
        self._hear()
        # Between requests one stays for the next turn of the chat just answered; the others are in the cache.
        self._leave(self._residents[:] if busy else self._residents[:-1])
        return any(not (r.exported or self._refused(r)) for r in self._residents)

    def leave(self) -> None:
        """What is in the cache leaves the context: somebody runs."""
        self._hear()
        self._leave(self._residents[:])

    def _leave(self, residents: Iterable[Resident]) -> None:
        """Those of them that are in the cache leave the context, where that makes the steps of others shorter."""
        if not self._backend.capabilities.kv_on_device:
            for resident in residents:
                if resident.exported:
                    self._drop(resident)

    def _stays(self, live: int) -> bool:
        """Is there nothing to be gained by exporting while `live` requests run?"""
        info = self._backend.info
        return (
            self._backend.capabilities.kv_on_device
            and self._backend.cells_free() > _FEW_CELLS * info.n_ctx
            and live + len(self._residents) < info.n_seq_max
        )

    def finish(self) -> None:
        """Export what is resident, waiting for room if it must: nothing else is going on any more."""
        while self._residents:
            more = self.tick(busy=False)
            if not more and not (self.waiting and self.kv.wait(_CLOSE_S)):
                return

    @property
    def waiting(self) -> bool:
        """True while something could be exported if only what is in memory were written."""
        return any(r.state == "awaiting" for r in self._residents)

    def make_room(self, cells: int, *, live: int, keep: Resident | None = None) -> bool:
        """Drop residents (exporting them first) until `cells` are free and one more sequence than `live` fits."""
        self._hear()
        for resident in sorted(self._residents, key=lambda r: not r.exported):
            if self._has_room(cells, live):
                return True
            if resident is not keep:
                self._export_all(resident)
                self._drop(resident)
        return self._has_room(cells, live)

    def drop_one(self) -> bool:
        """Drop a resident, one that is exported if there is one (else it is exported first); False if there is none."""
        if not self._residents:
            return False
        self._hear()
        resident = next((r for r in self._residents if r.exported), self._residents[0])
        self._export_all(resident)
        self._drop(resident)
        return True

    def _has_room(self, cells: int, live: int) -> bool:
        return self._backend.cells_free() >= cells and live + len(self._residents) <= self._backend.info.n_seq_max

    @property
    def residents(self) -> int:
        """Finished sequences still in the context."""
        return len(self._residents)

    def _refused(self, resident: Resident) -> bool:
        """There was no room for it, and nothing has changed since."""
        changes = self.kv.budget.changes
        return resident.state in ("awaiting", "refused") and resident.as_of == changes

    def _drop(self, resident: Resident) -> None:
        self._residents.remove(resident)
        self._backend.drop(resident.sequence)

    # --- exporting -----------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """What became of the copies since: written, demoted to disk, evicted."""
        self.kv.hear()
        changes = self.kv.budget.changes
        for resident in self._residents:
            if resident.exported and resident.as_of != changes:
                lacks = self.kv.lacks(resident.tokens)
                resident.state, resident.as_of = "exported" if lacks is None else "exporting", changes

    def _export_all(self, resident: Resident) -> None:
        """Export what there is room for, now: its cells are needed, so what is still to be written is not waited for."""
        while not resident.exported and self._export_next(resident, force=True):
            pass

    def _export_next(self, resident: Resident, *, force: bool = False) -> bool:
        """Export one piece; False if it can't be had, or there is no room for it in the cache."""
        if self._refused(resident) and not force:
            return False
        room = self.kv.export_next(resident.sequence, resident.tokens, resident.used, force=force)
        if self.kv.lacks(resident.tokens) is None:
            resident.state, resident.as_of = "exported", None
        else:
            resident.state, resident.as_of = _STATES[room or "never"], self.kv.budget.changes
        return room in (None, "now")
