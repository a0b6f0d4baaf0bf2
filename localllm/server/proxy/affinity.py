"""Which server of a pool a request goes to: where its conversation was before, else by its first blocks, then by load.

A conversation's KV lies on one server, so its turns go there: by what was sent where (`Trails`), and for one that was
never seen by consistent hashing (`Ring`) of its beginning up to the first thing a user said, so that a front that was
started anew, or another one beside it, decides alike. Pure: hashes and counts, no socket.
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
_MOST_TRAILS = 200_000
# A server that nobody's conversation binds takes this many times its even share of what runs, and one request more.
_BOUND = 1.25
# A conversation stays where it was until that server has so many requests more than the idlest, and twice as many.
_STICKS_UNTIL = 8


@dataclass
class Box:
    """One server of the pool: `active` requests run there. `up`: it answered when last asked. `draining`: it gets nothing
    new. `unheard`: how often in a row it was asked and said nothing in time."""

    name: str
    url: str
    up: bool = True
    draining: bool = False
    active: int = 0
    served: int = 0
    failed: int = 0
    unheard: int = 0

    @property
    def takes(self) -> bool:
        """May a request go there?"""
        return self.up and not self.draining


@dataclass(frozen=True, slots=True)
class Chain:
    """A request's beginnings, each as a hash of all up to it, shortest first. From the one at `start` on they tell one
    conversation from another: what is before it (a system text, tools) many have in common."""

    hashes: tuple[bytes, ...] = ()
    start: int = 0


def chain_of(body: Mapping[str, Any]) -> Chain:
    """The chain of a request's body, in any dialect; empty for what has no beginning to be found again."""
    head = [body.get(k) for k in ("model", "tools", "system", "instructions")]
    turns = body.get("messages", body.get("input"))
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        first = next((i for i, m in enumerate(turns) if m.get("role") not in ("system", "developer")), len(turns) - 1)
        return Chain(_hashes(head, turns), first)
    text = turns if isinstance(turns, str) and "prompt" not in body else body.get("prompt")
    if body.get("input") is not None and "instructions" not in body and not isinstance(text, str):
        return Chain()
    if isinstance(text, str) and text:
        cut = [text[i : i + _TEXT_BLOCK] for i in range(0, len(text), _TEXT_BLOCK)]
    elif isinstance(text, list) and text and all(isinstance(t, int) for t in text):
        cut = [json.dumps(text[i : i + _ID_BLOCK]) for i in range(0, len(text), _ID_BLOCK)]
    else:
        return Chain()
    return Chain(_hashes(head, cut))


def _hashes(head: object, blocks: Iterable[object]) -> tuple[bytes, ...]:
    state = blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=16)
    found = []
    for block in blocks:
        state.update(json.dumps(block, sort_keys=True).encode() + b"\0")
        found.append(state.copy().digest())
    return tuple(found)


class Ring:
    """Consistent hashing: a key's servers, first to last. Adding or taking away one moves only what was its own."""

    def __init__(self, names: Sequence[str]) -> None:
        points = ((blake2b(f"{n}#{i}".encode(), digest_size=16).digest(), n) for n in names for i in range(_POINTS))
        self._points = sorted(points)

    def order(self, key: bytes) -> list[str]:
        """Every name once, from the one that `key` belongs to."""
        at = bisect.bisect(self._points, (key, ""))
        return [*dict.fromkeys(name for _, name in self._points[at:] + self._points[:at])]


class Trails:
    """Where what was sent: the latest of them, no more than so many."""

    def __init__(self, most: int = _MOST_TRAILS) -> None:
        self._most = most
        self._where: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._where)

    def leave(self, marks: Iterable[bytes], name: str) -> None:
        """`marks` were sent to `name`."""
        for mark in marks:
            self._where[mark] = name
            self._where.move_to_end(mark)
        while len(self._where) > self._most:
            self._where.popitem(last=False)

    def find(self, mark: bytes) -> str | None:
        """Where `mark` was sent last."""
        return self._where.get(mark)


@dataclass
class Pool:
    """The servers and the choice between them."""

    boxes: Sequence[Box]
    trails: Trails = field(default_factory=Trails)

    def __post_init__(self) -> None:
        self._by_name = {box.name: box for box in self.boxes}
        self._ring = Ring([*self._by_name])

    def box(self, name: str) -> Box | None:
        """The server of that name, or of that address."""
        return self._by_name.get(name) or next((b for b in self.boxes if b.url == name.rstrip("/")), None)

    def pick(self, chain: Chain, without: frozenset[str] = frozenset(), mark: bytes | None = None) -> Box | None:
        """The server for a request of that chain, none of those it was tried at; None where there is none left. `mark`
        binds it to where that was left, whatever the load."""
        left = [box for box in self.boxes if not box.draining and box.name not in without]
        # Where none is known to be up, asking is better than guessing.
        able = {box.name: box for box in [b for b in left if b.up] or left}
        if not able:
            return None
        bound = self.trails.find(mark) if mark is not None else None
        if bound in able:
            return able[bound]
        idlest = min(able.values(), key=lambda b: b.active)
        if not chain.hashes:
            return idlest
        for known in reversed(chain.hashes[chain.start :]):
            box = able.get(self.trails.find(known) or "")
            if box is not None:
                crowded = box.active > max(2 * idlest.active, idlest.active + _STICKS_UNTIL)
                return idlest if crowded else box
        most = _BOUND * (sum(b.active for b in able.values()) + 1) / len(able) + 1
        order = [able[n] for n in self._ring.order(chain.hashes[min(chain.start, len(chain.hashes) - 1)]) if n in able]
        return next((box for box in order if box.active + 1 <= most), idlest)
