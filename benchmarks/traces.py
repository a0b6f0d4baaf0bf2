"""Prefix reuse on traces of real coding agents, compared with LRU and Belady of the same capacity.

python -m benchmarks.traces [PATH] [--together 1 3 8] [--memory 1 4 16 32] [--disk 0 8]

The capacity is memory, context and disk together. The engine runs on a backend without computation.
A session's tokens are artificial, but shared as in the trace. One simulated token stands for
sixteen, and KV has the bytes of an 8B (147,456 per token). PATH: the folder `traces` of
callanjfox/kv-cache-tester. Without it, the 30 sessions in benchmarks/data/agent_traces.json are
used, which are shapes from that set.

"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import json
import random
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.cells_only import SCALED_TOKEN_BYTES, CellsOnly
from localllm.engine import EngineSettings
from localllm.engine.cache import tunables
from localllm.engine.core import Engine
from localllm.engine.messages import Failure, Finish, Generation, Request, Sampling
from localllm.server.proxy.pool import PoolNode, by_preference

SHAPES = Path(__file__).parent / "data" / "agent_traces.json"
N_CTX = 131_072
BLOCK_TOKENS, SCALE = 64, 16
TOKEN_BYTES = 147_456  # an 8B with f16 KV: 36 layers, 8 heads of K and V, 128 wide
_SCALED_BLOCK = BLOCK_TOKENS // SCALE
# Files have headers, and short blocks take more bytes than their tokens.
_DISK_SLACK = 1.25
# The longest gap in a session, so that sessions really take turns, and the pause between the end of
# a session and the next one.
_LONGEST_GAP_S, _NEXT_SESSION_S = 600.0, 60.0


@dataclass(frozen=True)
class Ask:
    """One request of a session: its time, and its prompt as blocks of 64 tokens. Equal ids mean
    equal tokens after an equal prefix."""

    at_s: float
    blocks: tuple[Hashable, ...]


Session = list[Ask]


# --- reading --------------------------------------------------------------------------------------


def read_shapes(path: Path = SHAPES) -> list[Session]:
    """Return sessions from shapes: each request shares a number of blocks with an earlier one, and
    the first one with other sessions of the same kind."""
    found = []
    for shape in json.loads(path.read_text(encoding="utf-8")):
        session: Session = []
        for at_s, kind, source, shared, n_blocks in shape["requests"]:
            start: tuple[Hashable, ...] = session[source].blocks[:shared] if source >= 0 else ()
            if source < 0:
                start = tuple((kind, i) for i in range(min(shape["instructions_blocks"], n_blocks)))
            own = ((shape["session"], len(session), i) for i in range(len(start), n_blocks))
            session.append(Ask(at_s, (*start, *own)))
        found.append(session)
    return found


def read_traces(folder: Path) -> list[Session]:
    """Return sessions from full traces with hashes of 64-token blocks. Half of the blocks that the
    trace labels as tools and system prompt count as shared by all sessions."""
    found = []
    for path in sorted(folder.glob("trace_*.json")):
        trace = json.loads(path.read_text(encoding="utf-8"))
        asks = [*_hashed(trace, path.stem, "main", 0.0)]
        for request in trace["requests"]:
            if request.get("type") == "subagent":
                asks += _hashed(request, path.stem, "sub", request["t"])
        if asks:
            found.append(_squeezed(sorted(asks, key=lambda ask: ask.at_s)))
    return found


def _hashed(part: dict[str, object], session: str, kind: str, began_s: float) -> Iterator[Ask]:
    requests = part["requests"]
    assert isinstance(requests, list)
    common = 0.5 * (int(str(part["tool_tokens"])) + int(str(part["system_tokens"])))
    for request in requests:
        if "hash_ids" in request:
            blocks = [
                (kind, i) if i * BLOCK_TOKENS < common else (session, h)
                for i, h in enumerate(request["hash_ids"])
            ]
            yield Ask(began_s + request["t"], tuple(blocks))


def _squeezed(session: Session) -> Session:
    now_s, before_s, out = 0.0, session[0].at_s, []
    for ask in session:
        now_s += min(ask.at_s - before_s, _LONGEST_GAP_S)
        before_s = ask.at_s
        out.append(Ask(now_s, ask.blocks))
    return out


class Line(list[int]):
    """A request's prompt as ids of blocks, which are equal if the whole prefix is equal, with its
    time and the number of its session."""

    at_s = 0.0
    session = 0


def interleaved(sessions: Sequence[Session], together: int) -> list[Line]:
    """Return all requests in order of time, with `together` sessions at any time."""
    free_s, asks = [0.0] * together, []
    for number, session in enumerate(sessions):
        slot = min(range(together), key=lambda i: free_s[i])
        asks += [(number, Ask(free_s[slot] + ask.at_s, ask.blocks)) for ask in session]
        free_s[slot] += session[-1].at_s + _NEXT_SESSION_S
    ids: dict[tuple[int, Hashable], int] = {}
    lines = []
    for number, ask in sorted(asks, key=lambda numbered: numbered[1].at_s):
        line = Line()
        line.at_s = ask.at_s
        line.session = number
        for block in ask.blocks:
            line.append(ids.setdefault((line[-1] if line else 0, block), len(ids) + 1))
        lines.append(line)
    return lines


def by_server(lines: Sequence[Line], n_servers: int) -> list[list[Line]]:
    """Return the requests of each server in a pool. A session stays on one server."""
    nodes = [PoolNode(str(i), "") for i in range(n_servers)]
    parts: list[list[Line]] = [[] for _ in nodes]
    for line in lines:
        first = by_preference(nodes, str(line.session).encode(), 0.0)[0]
        parts[int(first.name)].append(line)
    return parts


# --- the limits -----------------------------------------------------------------------------------


def _leading(line: Sequence[int], held: object) -> int:
    return next((i for i, block in enumerate(line) if block not in held), len(line))  # type: ignore[operator]


def unlimited_hits(lines: Sequence[Sequence[int]]) -> int:
    """Return the blocks that a cache without limits reuses."""
    seen: set[int] = set()
    hits = 0
    for line in lines:
        hits += _leading(line, seen)
        seen.update(line)
    return hits


def lru_hits(lines: Sequence[Sequence[int]], capacity: int) -> int:
    """Return the blocks that an LRU cache of `capacity` blocks reuses. It drops the end of a prefix
    before its beginning."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for line in lines:
        hits += _leading(line, held)
        for block in reversed(line):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


def belady_hits(
    lines: Sequence[Sequence[int]], capacity: int, *, holds_current: bool = False
) -> int:
    """Return the blocks that an optimal cache of `capacity` blocks reuses. It knows the future and
    keeps the blocks that are reused soonest.

    `holds_current`: the blocks of the current request must be kept meanwhile, as in any engine.
    """
    never = 1 << 60
    uses: dict[int, list[int]] = {}
    for i, line in enumerate(lines):
        for block in line:
            uses.setdefault(block, []).append(i)
    held: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for i, line in enumerate(lines):
        hits += _leading(line, held)
        for depth, block in enumerate(line):
            coming = uses[block]
            while coming and coming[0] <= i:
                coming.pop(0)
            at = coming[0] if coming else never
            held[block] = at, depth
            heapq.heappush(heap, (-at, -depth, block))
        current, kept = frozenset(line if holds_current else ()), []
        while heap and (len(held) > capacity or heap[0][0] == -never):
            at, depth, block = heapq.heappop(heap)
            if held.get(block) == (-at, -depth):
                if block in current:
                    kept.append((at, depth, block))
                else:
                    del held[block]
        for entry in kept:
            heapq.heappush(heap, entry)
    return hits


# --- ours -----------------------------------------------------------------------------------------


class _Clock:
    """A clock that advances a little with each reading."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


@contextmanager
def _scaled() -> Iterator[None]:
    """Set the cache's tunables in scaled tokens, without pauses, and with a disk that is fast
    compared with prefill and always waited for."""
    scaled = {
        "PIECE_TOKENS": tunables.PIECE_TOKENS // SCALE, "MIN_TOKENS": 1, "EXPORT_FIRST_TOKENS": 8,
        "WRITE_PAUSE_S": 0.0,
        "WRITE_PATIENCE_S": 0.0, "WRITE_REST_S": 0.0,
        "WRITE_WAIT_SHARE": 1e9, "WRITE_WAIT_S": 1e6, "READ_STALLED_S": 1e6, "READ_SPEED_DECAY": 1.0,
    }  # fmt: skip
    before = {name: getattr(tunables, name) for name in scaled}
    try:
        for name, value in scaled.items():
            setattr(tunables, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(tunables, name, value)


@lru_cache(maxsize=2**18)
def _tokens_of(block: int) -> list[int]:
    digest = hashlib.blake2b(block.to_bytes(8, "little"), digest_size=_SCALED_BLOCK).digest()
    return [3 + b % 247 for b in digest]


def our_hits(
    lines: Sequence[Line], memory_tokens: int, disk_tokens: int, n_ctx: int = N_CTX
) -> float:
    """Return the blocks that our engine reuses, one request after the other. The pause after each
    is long enough for all background work."""
    with _scaled(), tempfile.TemporaryDirectory() as folder:
        scaled_bytes = SCALED_TOKEN_BYTES // SCALE
        settings = EngineSettings(
            cache_bytes=memory_tokens * scaled_bytes,
            disk_dir=folder if disk_tokens else None,
            disk_bytes=int(disk_tokens * scaled_bytes * _DISK_SLACK),
            disk_free_bytes=0,
            headroom_bytes=0,
        )
        engine = Engine(CellsOnly(n_ctx // SCALE + 64), settings, clock=_Clock())
        kv = engine.pool.kv
        kv.budget.clock = lambda: now_ns
        if kv.disk is not None:
            kv.disk.reads.learn(10**15, 1.0)
        hits = 0.0
        for i, line in enumerate(lines):
            now_ns = int(line.at_s * 1e9)
            prompt = [token for block in line for token in _tokens_of(block)]
            generation = Generation(Sampling(temperature=0.0), 1, ignore_eos=True)
            events = engine.submit(Request(f"r{i}", prompt, generation), prompt)
            while engine.has_work:
                if engine.can_step:
                    events += engine.step()
                else:
                    engine.idle()
            end = events[-1]
            if isinstance(end, Failure):
                raise RuntimeError(end.message)
            assert isinstance(end, Finish)
            hits += end.usage.cached_tokens / _SCALED_BLOCK
            _settle(engine)
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)
    return hits


def _settle(engine: Engine) -> None:
    disk = engine.pool.kv.disk
    while True:
        while engine.idle():
            pass
        if disk is None:
            return
        disk.flush()
        if not engine.pool.waiting:
            return


@dataclass(frozen=True)
class Reuse:
    """Shares of the reuse of a cache without limits."""

    ours: float
    lru: float
    belady: float
    reachable: float  # by Belady if the current request's blocks must be kept


def compare(lines: Sequence[Line], memory_gib: float, disk_gib: float, n_ctx: int = N_CTX) -> Reuse:
    """Compare ours with LRU and Belady for memory, disk and context together."""
    memory, disk = (int(gib * 2**30 / TOKEN_BYTES) for gib in (memory_gib, disk_gib))
    capacity, most = (memory + disk + n_ctx) // BLOCK_TOKENS, unlimited_hits(lines)
    ours = our_hits(lines, memory, disk, n_ctx)
    belady, reachable = (
        belady_hits(lines, capacity),
        belady_hits(lines, capacity, holds_current=True),
    )
    return Reuse(ours / most, lru_hits(lines, capacity) / most, belady / most, reachable / most)


def picked(
    sessions: Sequence[Session], n_ctx: int, seed: int, limit: int | None = None
) -> list[Session]:
    """Return at most `limit` sessions that fit a context of `n_ctx`, in an order that depends on
    `seed`."""
    fitting = [
        s
        for s in sessions
        if len(s) >= 5 and max(len(ask.blocks) for ask in s) * BLOCK_TOKENS <= n_ctx
    ]
    random.Random(seed).shuffle(fitting)
    return fitting[:limit]


def main() -> None:
    """Print a line for each number of sessions, memory and disk."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", nargs="?", type=Path, help="the folder `traces` of callanjfox/kv-cache-tester"
    )
    parser.add_argument("--together", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--memory", type=float, nargs="+", default=[1, 4, 16, 32], help="GiB")
    parser.add_argument("--disk", type=float, nargs="+", default=[0, 8], help="GiB")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    sessions = picked(
        read_traces(args.path) if args.path else read_shapes(), N_CTX, args.seed, args.sessions
    )
    print(f"{len(sessions)} sessions; share of what a cache without limits reuses\n")
    print(
        "| together | memory GiB | disk GiB | ours | LRU | Belady | reachable | ours ÷ reachable "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for together, disk, memory in itertools.product(args.together, args.disk, args.memory):
        r = compare(interleaved(sessions, together), memory, disk)
        figures = (
            f"{r.ours:.3f} | {r.lru:.3f} | {r.belady:.3f} | {r.reachable:.3f} | "
            f"{r.ours / r.reachable:.3f}"
        )
        print(f"| {together} | {memory:g} | {disk:g} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
