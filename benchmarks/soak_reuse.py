"""The reuse of a soak's prompts compared with a reference of the same budgets, and the budgets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.reference_cache import ReferenceCache
from benchmarks.soak_mix import Ask, Ended, Events, send

# Two answers to one prompt report one sum. A tool call is generated in several parts, after an
# instruction of ours.
_NOT_COMPARED = ("choices", "tools")
# The number of requests "after a restart": about one refill of the cache in the soak.
_AFTER_RESTART = 100


@dataclass(frozen=True, slots=True)
class Budgets:
    """The bytes that a cache may use in memory and in its folder."""

    memory_bytes: int
    disk_bytes: int
    folder: Path

    def broken(self, metrics: str) -> str:
        """Return the budget that /metrics and the folder exceed, or ""."""
        held, capacity = metric(metrics, "cache_bytes"), metric(metrics, "cache_capacity_bytes")
        on_disk = sum(_size(p) for p in self.folder.rglob("*") if p.is_file())
        if not held <= capacity <= self.memory_bytes:
            return f"{held / 1e6:.1f} MB of cache in memory, capacity {capacity / 1e6:.1f}"
        if on_disk > self.disk_bytes:
            return f"{on_disk / 1e6:.1f} MB of cache on disk, budget {self.disk_bytes / 1e6:.1f}"
        return ""


@dataclass(frozen=True, slots=True)
class Reused:
    """One compared request: its number in the soak and since the start, cached tokens, and the
    reference's tokens."""

    n: int
    since_start: int
    cached: int
    wanted: int


@dataclass
class Reuse:
    """Sends a soak's requests, and maintains a reference for the server's cache.

    The server itself renders a request's prompt. It is compared only if the request reports the
    same number of tokens. The reference is read when the request is sent, so it lacks sequences
    that ended while the request waited. The server may have them.
    """

    reference: ReferenceCache
    budgets: Budgets
    found: list[Reused] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    not_compared: int = 0
    starts: int = 1
    _ended: int = 0
    _since_start: int = 0

    def restart(self) -> None:
        """Record that the server was stopped cleanly and started again."""
        self.reference.restart(clean=True)
        self.starts, self._since_start = self.starts + 1, 0

    async def send(self, http: httpx.AsyncClient, ask: Ask) -> Ended:
        """Send `ask`, record its end, and compare."""
        prompt = await _prompt(http, ask) if ask.kind not in _NOT_COMPARED else None
        wanted = self.reference.reuse(prompt) if prompt is not None else 0
        events = Events()
        ended = await send(http, ask, events)
        self._ended += 1
        self._since_start += 1
        if prompt is not None and (events.text or ended.end == "finished"):
            # There was output, so the whole prompt was read. The last token of the output may not
            # have been.
            answer = await _tokens(http, events.text, first=False)
            self.reference.finished(prompt + answer[:-1])
        usage = events.usage
        if prompt is None or ended.end != "finished" or usage.get("prompt_tokens") != len(prompt):
            self.not_compared += 1
            return ended
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        self.found.append(Reused(self._ended, self._since_start, cached, wanted))
        return ended

    async def sample(self, http: httpx.AsyncClient) -> None:
        """Check the budgets now."""
        if said := self.budgets.broken((await http.get("/metrics")).text):
            self.broken.append(f"after {self._ended} requests: {said}")

    def tell(self) -> dict[str, object]:
        """Print the figures and return them."""
        tenths = self.tenths()
        after = share(
            [r for r in self.found if r.since_start <= _AFTER_RESTART and r.n > r.since_start]
        )
        print(
            "  reuse, of what the reference reuses, by tenths: "
            f"{'  '.join(f'{t:.3f}' for t in tenths)}"
        )
        print(
            f"  after {self.starts - 1} restarts (the {_AFTER_RESTART} requests behind each): "
            f"{after:.3f}"
        )
        print(
            f"  {len(self.found)} requests compared, {self.not_compared} not; budgets broken: "
            f"{self.broken or 'never'}"
        )
        return {
            "tenths": tenths,
            "after_restarts": after,
            "compared": len(self.found),
            "not_compared": self.not_compared,
            "broken": self.broken,
        }

    def tenths(self) -> list[float]:
        """Return the reused share in each tenth of the compared requests."""
        n = len(self.found)
        return [share(self.found[n * i // 10 : n * (i + 1) // 10]) for i in range(10)]


def share(found: Sequence[Reused]) -> float:
    """Return the reused share of the reference's tokens. Additional tokens of the server do not
    compensate for missing ones. Without tokens the share is 1."""
    wanted = sum(r.wanted for r in found)
    return sum(min(r.cached, r.wanted) for r in found) / wanted if wanted else 1.0


async def measured(http: httpx.AsyncClient, warm_up: Ask) -> int:
    """Return the bytes per token in the cache of a new server, from the cache's size after
    `warm_up`."""
    events = Events()
    await send(http, warm_up, events)
    tokens = events.usage["prompt_tokens"] + events.usage["completion_tokens"] - 1
    held = 0.0
    while not held:
        held = metric((await http.get("/metrics")).text, "cache_bytes")
    return round(held / tokens)


def metric(page: str, name: str) -> float:
    """Return the sum of a gauge over all models on a page of /metrics."""
    return sum(map(float, re.findall(rf"^localllm_{name}\{{.*\}} (\S+)$", page, re.M)))


async def _prompt(http: httpx.AsyncClient, ask: Ask) -> list[int] | None:
    """Return the prompt tokens of `ask` from the server, or None if it does not return them."""
    text = ask.body.get("prompt")
    if text is None:
        reply = await http.post("/apply-template", json={"messages": ask.body["messages"]})
        if reply.status_code != 200:
            return None
        text = reply.json()["prompt"]
    return await _tokens(http, text, first=True)


async def _tokens(http: httpx.AsyncClient, text: str, *, first: bool) -> list[int]:
    body = {"content": text, "add_special": first, "parse_special": True}
    tokens: list[int] = (await http.post("/tokenize", json=body)).json()["tokens"]
    return tokens


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
