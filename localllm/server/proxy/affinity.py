"""Picks the node of a pool for a request: prefix affinity first, then consistent hashing, then the lowest load.

A conversation's KV cache lies on one node, so its later turns go there. `AffinityMap` remembers which prefix went where;
a prefix it has not seen is placed by hashing its beginning up to the first user message (`HashRing`), so that a restarted
front, or a second one, decides alike. Pure: hashes and counts, no I/O.
"""

from __future__ import annotations

import bisect
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

_POINTS = 64
_TEXT_BLOCK = 512
_ID_BLOCK = 128
_MAX_ENTRIES = 200_000
# Bounded load: a node without affinity takes at most this many times its even share of running requests, plus one.
_BOUND = 1.25
# Affinity holds until the node has this many more requests than the least loaded one, and twice as many.
_STICKS_UNTIL = 8


@dataclass
class PoolNode:
    """One server of the pool; `active` requests run there. `up`: its last health check passed. `draining`: it gets no new
    requests. `timeouts`: health checks in a row that timed out."""

    name: str
    url: str
    up: bool = True
    draining: bool = False
    active: int = 0
    served: int = 0
    failed: int = 0
    timeouts: int = 0

    @property
    def takes(self) -> bool:
        """Whether it accepts requests."""
        return self.up and not self.draining


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """Rolling hashes of a request's prefix, shortest first. From `start` on they tell conversations apart: what comes
    before (system prompt, tools) is shared by many."""

    hashes: tuple[bytes, ...] = ()
    start: int = 0


def prefix_hashes(body: Mapping[str, Any]) -> PrefixHashes:
    """The prefix hashes of a body in any dialect; empty where there is no prefix to find again."""
    head = [body.get(k) for k in ("model", "tools", "system", "instructions")]
    turns = body.get("messages", body.get("input"))
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        first = next((i for i, m in enumerate(turns) if m.get("role") not in ("system", "developer")), len(turns) - 1)
        return PrefixHashes(_hashes(head, turns), first)
    text = turns if isinstance(turns, str) and "prompt" not in body else body.get("prompt")
    if body.get("input") is not None and "instructions" not in body and not isinstance(text, str):
        return PrefixHashes()
    if isinstance(text, str) and text:
        cut = [text[i : i + _TEXT_BLOCK] for i in range(0, len(text), _TEXT_BLOCK)]
    elif isinstance(text, list) and text and all(isinstance(t, int) for t in text):
        cut = [json.dumps(text[i : i + _ID_BLOCK]) for i in range(0, len(text), _ID_BLOCK)]
    else:
        return PrefixHashes()
    return PrefixHashes(_hashes(head, cut))


def _hashes(head: object, blocks: Iterable[object]) -> tuple[bytes, ...]:
    state = blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=16)
    found = []
    for block in blocks:
        state.update(json.dumps(block, sort_keys=True).encode() + b"\0")
        found.append(state.copy().digest())
    return tuple(found)


class HashRing:
    """Consistent hashing: adding or removing a node moves only that node's keys."""

    def __init__(self, names: Sequence[str]) -> None:
        points = ((blake2b(f"{n}#{i}".encode(), digest_size=16).digest(), n) for n in names for i in range(_POINTS))
        self._points = sorted(points)

    def order(self, key: bytes) -> list[str]:
        """Every name once, starting with the one that owns `key`."""
        at = bisect.bisect(self._points, (key, ""))
        return [*dict.fromkeys(name for _, name in self._points[at:] + self._points[:at])]


class AffinityMap:
    """LRU map from prefix hash (or stored id) to the node it was last sent to."""

    def __init__(self, most: int = _MAX_ENTRIES) -> None:
        self._most = most
        self._where: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._where)

    def record(self, keys: Iterable[bytes], name: str) -> None:
        for key in keys:
            self._where[key] = name
            self._where.move_to_end(key)
        while len(self._where) > self._most:
            self._where.popitem(last=False)

    def find(self, key: bytes) -> str | None:
        return self._where.get(key)


@dataclass
class NodePool:
    """The nodes, and which of them a request goes to."""

    nodes: Sequence[PoolNode]
    affinity: AffinityMap = field(default_factory=AffinityMap)

    def __post_init__(self) -> None:
        self._by_name = {node.name: node for node in self.nodes}
        self._ring = HashRing([*self._by_name])

    def node(self, name: str) -> PoolNode | None:
        """The node of that name or URL."""
        return self._by_name.get(name) or next((b for b in self.nodes if b.url == name.rstrip("/")), None)

    def pick(
        self, prefix: PrefixHashes, without: frozenset[str] = frozenset(), key: bytes | None = None
    ) -> PoolNode | None:
        """The node for a request with that prefix, leaving out those already tried (`without`); None if none is left.
        `key` is a stored id that binds the request to its node whatever the load."""
        left = [node for node in self.nodes if not node.draining and node.name not in without]
        # If no node is known to be up, try one anyway.
        able = {node.name: node for node in [b for b in left if b.up] or left}
        if not able:
            return None
        bound = self.affinity.find(key) if key is not None else None
        if bound in able:
            return able[bound]
        idlest = min(able.values(), key=lambda b: b.active)
        if not prefix.hashes:
            return idlest
        for known in reversed(prefix.hashes[prefix.start :]):
            node = able.get(self.affinity.find(known) or "")
            if node is not None:
                crowded = node.active > max(2 * idlest.active, idlest.active + _STICKS_UNTIL)
                return idlest if crowded else node
        most = _BOUND * (sum(b.active for b in able.values()) + 1) / len(able) + 1
        order = [
            able[n] for n in self._ring.order(prefix.hashes[min(prefix.start, len(prefix.hashes) - 1)]) if n in able
        ]
        return next((node for node in order if node.active + 1 <= most), idlest)
