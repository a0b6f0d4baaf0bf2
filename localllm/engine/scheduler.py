"""What goes into the next step: pure decisions over counts of tokens. Touches no tensor, no
backend, no clock.

A step is one sweep over the weights. Every decoding sequence gets its next token (and its draft);
what is left of the batch goes to prefill. While somebody is decoding, prefill is cut into chunks
small enough that no step takes long (step_costs.py): a long prompt never freezes another stream.
(Where the backend can pause in the middle of a sweep, long prompts get
slices of time between the steps instead: prefill_slices.py.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Whoever has so few tokens left to read is as impatient as who decodes.
_SHORT_TOKENS = 16
# Waiting this much longer outweighs this many more tokens to prefill: nobody starves behind short
# prompts.
_AGE_TOKENS_PER_S = 500.0
# One step of priority is worth as much as having come this much earlier: whoever waits long enough
# is next all the same.
_HEAD_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Want:
    """What one request could use: `prefill` tokens still to read, or `decode` tokens (1 + draft
    length). `computed`: what was computed for its tenant, in tokens (scheduler.py; None: there is
    only one)."""

    key: str
    prefill: int
    decode: int = 0
    waited_s: float = 0.0
    computed: int | None = None


class Grant(NamedTuple):
    """Tokens of request `key` that go into the step."""

    key: str
    n_tokens: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard limits of one step: batch tokens, rows of logits, and the prefill tokens allowed beside
    decoding (`chunk`) and when nobody decodes (`prompt_only`)."""

    n_batch: int
    n_outputs: int
    chunk: int
    prompt_only: int


def plan_step(wants: Sequence[Want], limits: Limits) -> list[Grant]:
    """Grants for the next step, decodes first. Every decoding request gets at least its one token
    if the batch has room for all of them; drafts are shortened evenly before anybody is left
    out."""
    decoding = [w for w in wants if not w.prefill and w.decode]
    prefilling = sorted((w for w in wants if w.prefill), key=_rank)
    # A prefill that ends in this step needs one row of logits too.
    outputs = max(len(decoding), limits.n_outputs - min(len(prefilling), 1))
    shares = _share([w.decode for w in decoding], min(limits.n_batch, outputs))
    grants = [Grant(w.key, n, prefill=False) for w, n in zip(decoding, shares, strict=True) if n]
    return [*grants, *_prefill_grants(prefilling, sum(shares), limits)]


def _prefill_grants(prefilling: Sequence[Want], used: int, limits: Limits) -> list[Grant]:
    """Grants for prompts in a step of which decodes have `used` tokens and rows of logits."""
    grants: list[Grant] = []
    rows = limits.n_outputs - used
    shared = used > 0
    room = min(limits.n_batch - used, limits.n_batch if shared else limits.prompt_only)
    for want in prefilling:
        # A prompt with a few tokens left is as impatient as a decoding stream: it is not made to
        # wait for a long one.
        is_short = want.prefill <= _SHORT_TOKENS
        if shared and not is_short:
            room = min(room, max(limits.chunk, 1))
        shared = shared or is_short
        n = min(want.prefill, room)
        if n <= 0:
            break
        ends = n == want.prefill
        if ends and rows <= 0:
            continue
        rows -= ends
        grants.append(Grant(want.key, n, prefill=True))
        room -= n
    return grants


def _share(wanted: Sequence[int], budget: int) -> list[int]:
    """Give everybody one, then round by round one more, until `budget` is spent or nobody wants
    more."""
    given = [0] * len(wanted)
    while budget > 0:
        open_ = [i for i, n in enumerate(wanted) if given[i] < n]
        if not open_:
            break
        for i in open_[:budget]:
            given[i] += 1
        budget -= len(open_)
    return given


def arrival(submitted_s: float, priority: int) -> float:
    """When a request would have come for its place in the queue, had it no priority."""
    return submitted_s - priority * _HEAD_START_S


def admission_order(waiting: Sequence[Want]) -> list[str]:
    """Keys, least to read first, with age counted against that, within a tenant; the tenant that
    has had least first."""
    return [w.key for w in sorted(waiting, key=_rank)]


def _rank(want: Want) -> tuple[bool, int, float]:
    """Between tenants age does not count: a long queue would make its owner's requests old, and so
    the next. But what waits behind all others (a priority below 0, until it has waited long) does
    so across tenants too."""
    mine = want.prefill - want.waited_s * _AGE_TOKENS_PER_S
    if want.computed is None:
        return False, 0, mine
    return want.waited_s < 0, want.computed, mine


Sharer = tuple[str, ...]
# How far below the others a newcomer begins, in tokens: a chat's prompt and its answer.
CREDIT_TOKENS = 2048
# More tokens than an engine computes.
_BEFORE_ALL = 2**62


@dataclass
class Shares:
    """Shares the engine evenly between tenants (keys with names), and where there is one between
    its requests of several choices, each of them a sharer, and all others: the tokens computed for
    each since the engine began. A sharer is a tenant and the name of such a request.

    Who has had least is next. A newcomer begins `CREDIT_TOKENS` below the least of those at work,
    so that short requests of somebody who asks seldom go first, and nobody saves up more than that
    by staying away."""

    computed: dict[Sharer, int] = field(default_factory=dict)
    _present: set[Sharer] = field(default_factory=set)

    def arrive(self, sharer: Sharer) -> None:
        """`sharer` has a request where it had none."""
        if not self._present:
            self.computed = {}
        for part in (slice(None), slice(1)):
            rivals = {s[part] for s in self._present}
            if sharer[part] not in rivals:
                least = min((self.computed[r] for r in rivals), default=CREDIT_TOKENS)
                had = self.computed.get(sharer[part], 0)
                self.computed[sharer[part]] = max(had, least - CREDIT_TOKENS)
        self._present.add(sharer)

    def charge(self, sharer: Sharer, n_tokens: int) -> None:
        for part in {sharer, sharer[:1]} if sharer in self._present else ():
            self.computed[part] += n_tokens

    def remain(self, sharers: Iterable[Sharer]) -> None:
        """Only these have requests now."""
        self._present &= set(sharers)

    def party(self, sharer: Sharer) -> Sharer:
        """As which it has its share: its tenant where there are several."""
        tenants = {s[:1] for s in self._present}
        if len(tenants) > 1:
            return sharer[:1]
        return sharer

    @property
    def shared(self) -> bool:
        """True while more than one of them has requests."""
        return len(self._present) > 1

    def computed_for(self, sharer: Sharer, placed: Collection[Sharer] | None = None) -> int | None:
        """What was computed for `sharer`; None while there is nobody to share with. Who is not
        among the parties that are `placed` comes before them, whatever it had."""
        if not self.shared:
            return None
        party = self.party(sharer)
        return self.computed.get(party, 0) - (
            0 if placed is None or party in placed else _BEFORE_ALL
        )

    def preempted(self, for_: Sharer, running: Iterable[Sharer]) -> Sharer | None:
        """The party that gives one of its places among the `running` (one entry for each request)
        to a request of `for_`: the one with most, where it has at least two more. None: nobody has
        to."""
        counts = Counter(map(self.party, running))
        if not counts:
            return None
        most = max(counts, key=lambda p: (counts[p], self.computed.get(p, 0)))
        # Afterwards it still has at least as many: no two of them take a place from each other by
        # turns.
        if counts[most] >= counts[self.party(for_)] + 2:
            return most
        return None
