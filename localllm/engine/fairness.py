"""What there is is shared evenly between those who ask (tenants: keys with names): who is next, and who makes way.

Each tenant has a meter of the tokens computed for it. Who has had least is next, and one that comes anew begins a credit
below the least of those at work: short requests of somebody who asks seldom go first, however many a neighbour has
queued, and nobody can save up more than that by staying away. Pure: counts of tokens, no clock, no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# How far below the others a newcomer begins, in tokens: a chat's prompt and its answer.
CREDIT_TOKENS = 2048


@dataclass
class Shares:
    """The meters, in tokens computed (read and written) since the engine began."""

    computed: dict[str, int] = field(default_factory=dict)
    _present: set[str] = field(default_factory=set)

    def arrive(self, tenant: str) -> None:
        """`tenant` has a request where it had none."""
        if tenant in self._present:
            return
        if self._present:
            least = min(self.computed[t] for t in self._present)
            self.computed[tenant] = max(self.computed.get(tenant, 0), least - CREDIT_TOKENS)
        else:
            self.computed = {tenant: 0}
        self._present.add(tenant)

    def charge(self, tenant: str, n_tokens: int) -> None:
        """Tokens were computed for `tenant`."""
        if tenant in self._present:
            self.computed[tenant] += n_tokens

    def remain(self, tenants: Iterable[str]) -> None:
        """Only these have requests now."""
        self._present &= set(tenants)

    @property
    def shared(self) -> bool:
        """True while more than one of them has requests."""
        return len(self._present) > 1

    def had(self, tenant: str) -> int | None:
        """What `tenant` has had; None while there is nobody to share with."""
        return self.computed.get(tenant, 0) if self.shared else None

    def behind(self, tenant: str, other: str) -> bool:
        """True where `tenant` has had less than `other`, and both are here."""
        return self.shared and self.computed.get(tenant, 0) < self.computed.get(other, 0)

    def makes_way(self, for_: str, running: Iterable[str]) -> str | None:
        """The tenant that gives one of its places among the `running` (one entry for each request) to a request of
        `for_`: the one with most, where it has at least two more. None: nobody has to."""
        counts: dict[str, int] = {}
        for tenant in running:
            counts[tenant] = counts.get(tenant, 0) + 1
        if not counts:
            return None
        most = max(counts, key=lambda t: (counts[t], self.computed.get(t, 0)))
        # Afterwards it still has at least as many: no two of them take a place from each other by turns.
        return most if counts[most] >= counts.get(for_, 0) + 2 else None
