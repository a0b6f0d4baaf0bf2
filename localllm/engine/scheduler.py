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
class StepDemand:
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
    with decoding (`chunk`) or without (`prompt_only`).

    `joining`: prefill tokens of other tenants in a step that reads the rest of a prompt of the
    tenant that is next."""

    n_batch: int
    n_outputs: int
    chunk: int
    prompt_only: int
    joining: int = 0


def plan_step(demands: Sequence[StepDemand], limits: Limits) -> list[Grant]:
    """Grants for the next step, decodes first.

    Every decoding request gets at least one token if the batch has room for all of them. Drafts are
    shortened evenly before a request is left out.
    """
    decoding = [demand for demand in demands if not demand.prefill and demand.decode]
    prefilling = sorted((demand for demand in demands if demand.prefill), key=_rank)
    # A prefill that ends in this step needs one row of logits too.
    outputs = max(len(decoding), limits.n_outputs - min(len(prefilling), 1))
    shares = _share([demand.decode for demand in decoding], min(limits.n_batch, outputs))
    grants = [
        Grant(demand.key, n, prefill=False) for demand, n in zip(decoding, shares, strict=True) if n
    ]
    return [*grants, *_prefill_grants(prefilling, sum(shares), limits)]


def _prefill_grants(prefilling: Sequence[StepDemand], used: int, limits: Limits) -> list[Grant]:
    """Grants for prompts, in a step whose decodes use `used` tokens and rows of logits.

    The first prompt in order gets at least half of the tokens. The shortest prompt of its tenant
    may take the other half. So a short prompt never waits until a long, older one is read, however
    slow the machine is. Prompts of other tenants must not make the step much longer that reads the
    rest of the first prompt.
    """
    grants: list[Grant] = []
    if not prefilling:
        return grants
    first = prefilling[0]
    shortest = _shortest(prefilling)
    halved = shortest is not first
    order = [shortest, *(d for d in prefilling if d is not shortest)]
    rows = limits.n_outputs - used
    shared = used > 0
    room = min(limits.n_batch - used, limits.n_batch if shared else limits.prompt_only)
    for demand in order:
        room = min(room, _most_tokens(demand, first, grants, limits))
        # A prompt with few tokens left is treated like a decoding stream, so it does not wait for a
        # long prompt.
        is_short = demand.prefill <= _SHORT_TOKENS
        if shared and not is_short:
            room = min(room, max(limits.chunk, 1))
        shared = shared or is_short
        n = min(demand.prefill, room)
        if halved and demand is shortest:
            n = min(n, room - room // 2)
        if n <= 0:
            break
        ends = n == demand.prefill
        if ends and rows <= 0:
            continue
        rows -= ends
        grants.append(Grant(demand.key, n, prefill=True))
        room -= n
    return grants


def _shortest(prefilling: Sequence[StepDemand]) -> StepDemand:
    """The prompt with the fewest tokens, of the tenant that is next. Only the first one may have a
    low priority."""
    first = prefilling[0]
    normal = [d for d in prefilling if d.waited_s >= 0 and d.computed == first.computed]
    return min([first, *normal], key=lambda d: d.prefill)


def _most_tokens(
    demand: StepDemand, first: StepDemand, grants: Sequence[Grant], limits: Limits
) -> int:
    """How many tokens a prompt may have in the step: few if it is another tenant's, and the step
    reads the rest of `first`."""
    ends = Grant(first.key, first.prefill, prefill=True) in grants
    if ends and demand.computed != first.computed:
        return limits.joining
    return limits.n_batch


def _share(wanted: Sequence[int], budget: int) -> list[int]:
    """Give each request one, then one more in each round, until `budget` is used up or all requests
    are satisfied."""
    granted = [0] * len(wanted)
    while budget > 0:
        unmet = [i for i, n in enumerate(wanted) if granted[i] < n]
        if not unmet:
            break
        for i in unmet[:budget]:
            granted[i] += 1
        budget -= len(unmet)
    return granted


def arrival(submitted_s: float, priority: int) -> float:
    """The arrival time that decides a request's place in the queue. Each level of priority makes it
    earlier."""
    return submitted_s - priority * _HEAD_START_S


def admission_order(waiting: Sequence[StepDemand]) -> list[str]:
    """Keys in order of admission. The tenant with the fewest computed tokens comes first. Within a
    tenant, the fewest tokens to read come first, less an allowance for age."""
    return [demand.key for demand in sorted(waiting, key=_rank)]


def _rank(demand: StepDemand) -> tuple[bool, int, float]:
    """Sort key of a request.

    Age does not count between tenants: a long queue would make its owner's requests old, and so put
    them first. A priority below 0 does count between tenants: until such a request has waited long,
    it comes after the requests of all tenants.
    """
    weighted_tokens = demand.prefill - demand.waited_s * _AGE_TOKENS_PER_S
    if demand.computed is None:
        return False, 0, weighted_tokens
    return demand.waited_s < 0, demand.computed, weighted_tokens


# (tenant, request with several choices or ""), or only (tenant,).
ShareKey = tuple[str, ...]
# A new requester starts this many tokens below the others: about one chat prompt and its answer.
CREDIT_TOKENS = 2048
# More tokens than an engine ever computes.
_BEFORE_ALL = 2**62


@dataclass
class Shares:
    """Shares the engine evenly between tenants (keys with names), by the number of tokens computed
    for each.

    If there is only one tenant, each of its requests for several choices gets a share, and all its
    other requests get one together. A share key is a pair of a tenant and the name of such a
    request.

    The key with the fewest tokens is next. A new key starts `CREDIT_TOKENS` below the lowest
    active one. So short requests of an occasional user go first, and an idle user can't save up
    more than that.
    """

    computed: dict[ShareKey, int] = field(default_factory=dict)
    _present: set[ShareKey] = field(default_factory=set)

    def add_requester(self, share_key: ShareKey) -> None:
        """Record that `share_key` has its first request now."""
        if not self._present:
            self.computed = {}
        for part in (slice(None), slice(1)):
            active = {s[part] for s in self._present}
            if share_key[part] not in active:
                lowest = min((self.computed[r] for r in active), default=CREDIT_TOKENS)
                own = self.computed.get(share_key[part], 0)
                self.computed[share_key[part]] = max(own, lowest - CREDIT_TOKENS)
        self._present.add(share_key)

    def charge(self, share_key: ShareKey, n_tokens: int) -> None:
        if share_key in self._present:
            for part in {share_key, share_key[:1]}:
                self.computed[part] += n_tokens

    def keep_only(self, share_keys: Iterable[ShareKey]) -> None:
        """Keep only the keys that still have requests."""
        self._present &= set(share_keys)

    def share_unit(self, share_key: ShareKey) -> ShareKey:
        """The unit that gets a share: the tenant of `share_key` if there are several tenants, else
        `share_key` itself."""
        tenants = {s[:1] for s in self._present}
        if len(tenants) > 1:
            return share_key[:1]
        return share_key

    @property
    def shared(self) -> bool:
        """True while more than one key has requests."""
        return len(self._present) > 1

    def tokens_computed(
        self, share_key: ShareKey, placed: Collection[ShareKey] | None = None
    ) -> int | None:
        """Tokens computed for the unit of `share_key`; None if there is only one key. A unit
        outside `placed` comes before those in it, whatever its count."""
        if not self.shared:
            return None
        unit = self.share_unit(share_key)
        computed = self.computed.get(unit, 0)
        if placed is None or unit in placed:
            return computed
        return computed - _BEFORE_ALL

    def unit_to_preempt(self, claimant: ShareKey, running: Iterable[ShareKey]) -> ShareKey | None:
        """The unit whose request is preempted for one of `claimant`, or None. `running` has one key
        per running request. It is the unit with the most requests, if it has at least two more."""
        counts = Counter(map(self.share_unit, running))
        if not counts:
            return None
        largest = max(counts, key=lambda p: (counts[p], self.computed.get(p, 0)))
        # Afterwards it still has at least as many requests, so two units never preempt each other
        # in turn.
        if counts[largest] >= counts[self.share_unit(claimant)] + 2:
            return largest
        return None
