"""Decides the contents of the next step, from token counts only. Uses no tensor, no backend and no
clock.

A step is one pass over the weights. Every decoding sequence gets its next token and its draft. The
rest of the batch goes to prefill. While any request decodes, prefill is cut into chunks so small
that no step takes long (step_costs.py), so a long prompt never blocks another stream. If the
backend can pause in the middle of a pass, long prompts get time slices between the steps instead
(prefill_slices.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# A prompt with at most this many tokens left is treated like a decoding stream.
_SHORT_TOKENS = 16
# One second of waiting outweighs this many more tokens to prefill, so short prompts can't starve a
# long one.
_AGE_TOKENS_PER_S = 500.0
# One level of priority counts like arriving this many seconds earlier. A request that waits long
# enough still gets its turn.
_HEAD_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Want:
    """The tokens that one request can use in a step: `prefill` tokens still to read, or `decode`
    tokens (1 + draft length).

    `computed`: tokens computed for its tenant so far (None: there is only one).
    """

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
    """Hard limits of one step: tokens in the batch, rows of logits, and prefill tokens in a step
    with decoding (`chunk`) or without (`prompt_only`)."""

    n_batch: int
    n_outputs: int
    chunk: int
    prompt_only: int


def plan_step(wants: Sequence[Want], limits: Limits) -> list[Grant]:
    """Grants for the next step, decodes first.

    Every decoding request gets at least one token if the batch has room for all of them. Drafts are
    shortened evenly before a request is left out.
    """
    decoding = [w for w in wants if not w.prefill and w.decode]
    prefilling = sorted((w for w in wants if w.prefill), key=_rank)
    # A prefill that ends in this step needs one row of logits too.
    outputs = max(len(decoding), limits.n_outputs - min(len(prefilling), 1))
    shares = _share([w.decode for w in decoding], min(limits.n_batch, outputs))
    grants = [Grant(w.key, n, prefill=False) for w, n in zip(decoding, shares, strict=True) if n]
    return [*grants, *_prefill_grants(prefilling, sum(shares), limits)]


def _prefill_grants(prefilling: Sequence[Want], used: int, limits: Limits) -> list[Grant]:
    """Grants for prompts, in a step whose decodes use `used` tokens and rows of logits."""
    grants: list[Grant] = []
    rows = limits.n_outputs - used
    shared = used > 0
    room = min(limits.n_batch - used, limits.n_batch if shared else limits.prompt_only)
    for want in prefilling:
        # A prompt with few tokens left is treated like a decoding stream, so it does not wait for a
        # long prompt.
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
    """Give each request one, then one more in each round, until `budget` is used up or all requests
    are satisfied."""
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
    """The arrival time that decides a request's place in the queue. Each level of priority makes it
    earlier."""
    return submitted_s - priority * _HEAD_START_S


def admission_order(waiting: Sequence[Want]) -> list[str]:
    """Keys in order of admission. The tenant with the fewest computed tokens comes first. Within a
    tenant, the fewest tokens to read come first, less an allowance for age."""
    return [w.key for w in sorted(waiting, key=_rank)]


def _rank(want: Want) -> tuple[bool, int, float]:
    """Sort key of a request.

    Age does not count between tenants: a long queue would make its owner's requests old, and so put
    them first. A priority below 0 does count between tenants: until such a request has waited long,
    it comes after the requests of all tenants.
    """
    mine = want.prefill - want.waited_s * _AGE_TOKENS_PER_S
    if want.computed is None:
        return False, 0, mine
    return want.waited_s < 0, want.computed, mine


Sharer = tuple[str, ...]
# A newcomer starts this many tokens below the others: about one chat prompt and its answer.
CREDIT_TOKENS = 2048
# More tokens than an engine ever computes.
_BEFORE_ALL = 2**62


@dataclass
class Shares:
    """Shares the engine evenly between tenants (keys with names), by the number of tokens computed
    for each.

    If there is only one tenant, each of its requests for several choices gets a share, and all its
    other requests get one together. A sharer is a pair of a tenant and the name of such a request.

    The sharer with the fewest tokens is next. A newcomer starts `CREDIT_TOKENS` below the lowest
    active one. So short requests of an occasional user go first, and an idle user can't save up
    more than that.
    """

    computed: dict[Sharer, int] = field(default_factory=dict)
    _present: set[Sharer] = field(default_factory=set)

    def arrive(self, sharer: Sharer) -> None:
        """Note that `sharer` has its first request now."""
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
        """Keep only the sharers that still have requests."""
        self._present &= set(sharers)

    def party(self, sharer: Sharer) -> Sharer:
        """The unit of sharing for `sharer`: its tenant if there are several tenants, else the
        sharer itself."""
        tenants = {s[:1] for s in self._present}
        if len(tenants) > 1:
            return sharer[:1]
        return sharer

    @property
    def shared(self) -> bool:
        """True while more than one sharer has requests."""
        return len(self._present) > 1

    def computed_for(self, sharer: Sharer, placed: Collection[Sharer] | None = None) -> int | None:
        """Tokens computed for the party of `sharer`; None if there is only one sharer. A party
        outside `placed` comes before those in it, whatever its count."""
        if not self.shared:
            return None
        party = self.party(sharer)
        return self.computed.get(party, 0) - (
            0 if placed is None or party in placed else _BEFORE_ALL
        )

    def preempted(self, for_: Sharer, running: Iterable[Sharer]) -> Sharer | None:
        """The party that must give one of its places among `running` (one entry per request) to a
        request of `for_`. It is the party with the most places, if it has at least two more.
        Returns None if no party must give one up."""
        counts = Counter(map(self.party, running))
        if not counts:
            return None
        most = max(counts, key=lambda p: (counts[p], self.computed.get(p, 0)))
        # Afterwards it still has at least as many places, so two parties never take a place from
        # each other in turn.
        if counts[most] >= counts[self.party(for_)] + 2:
            return most
        return None
