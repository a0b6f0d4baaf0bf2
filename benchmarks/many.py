"""A pool at sizes that can't be run here, simulated: 1 to 32 boxes, 1 to 10,000 people; prefix routing against round robin.

    python -m benchmarks.many [--boxes 1,4,32] [--people 10,300,10000] [--minutes 20] [--costs FULL.json]
                              [--device "rtx 4090"] [--model qwen3-8b] [--cache-tokens 2000000] [--seed 1] [--out FILE]

The router is `serve --pool`'s own (localllm/server/proxy/affinity.py). What a box costs is measured (--costs: what
`localllm bench MODEL --full --json` printed there) or predicted for --device. People are of three typical kinds: chats,
coding agents (long instructions that many share, quick turns), and readers of long documents. Told are the share of prompt
tokens that had not to be read (and of those that a cache without limits would have had), and the time to the first token. A
box reads one prompt at a time with most of its time while others are written, keeps what fits, and forgets what was used
longest ago; boxes share nothing. That is a model of a server: use it to compare routes, not to promise times.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from localllm.server.proxy.affinity import NodePool, PoolNode, PrefixHashes

# Of a box's time, what a prompt gets while answers are written beside it.
_PREFILL_SHARE = 0.7
_SLOTS = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """What a box takes: prompt tokens/s, and seconds of a decode step for so many streams, by their number."""

    prefill_tok_s: float
    steps: tuple[tuple[int, float], ...]

    def step_s(self, n: int) -> float:
        """Between the numbers that are known in straight lines, beyond the last in its line."""
        known = self.steps
        if n <= known[0][0] or len(known) == 1:
            return known[0][1]
        at = next((i for i in range(1, len(known)) if n <= known[i][0]), len(known) - 1)
        (a, first), (b, second) = known[at - 1], known[at]
        return max(1e-6, first + (second - first) * (n - a) / (b - a))


@dataclass(frozen=True, slots=True)
class Kind:
    """How one sort of person works: medians of tokens and seconds, and turns on average. `apps`: so many instruction texts
    there are, of `system` tokens, that all of this kind share."""

    share: float
    apps: int
    system: int
    first: int
    question: int
    answer: int
    think_s: float
    turns: float
    away_s: float


KINDS = (
    Kind(0.6, 5, 400, 120, 60, 250, 40.0, 6, 600.0),
    Kind(0.3, 3, 9000, 1500, 800, 150, 3.0, 25, 300.0),
    Kind(0.1, 2, 300, 12000, 80, 400, 60.0, 4, 900.0),
)


@dataclass
class Turn:
    """One request: `known_tokens` of its prompt were read or written before, somewhere; `cached` by the box it went to."""

    person: int
    chain: PrefixHashes
    app: bytes
    system: int
    prompt: int
    known_tokens: int
    answer: int
    sent_s: float = 0.0
    cached: int = 0
    left: float = 0.0


@dataclass
class Machine:
    """A box: a queue, one prompt being read, answers being written, and what it remembers."""

    costs: Costs
    cache_tokens: int
    queue: deque[Turn] = field(default_factory=deque)
    reading: Turn | None = None
    writing: list[Turn] = field(default_factory=list)
    kept: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    held: int = 0
    now_s: float = 0.0

    def look_up(self, turn: Turn) -> int:
        """Tokens of its prompt that are known here."""
        conversation = turn.chain.hashes[1]
        for key in (turn.app, conversation):
            if key in self.kept:
                self.kept.move_to_end(key)
        shared = turn.system if turn.app in self.kept else 0
        return min(max(shared, self.kept.get(conversation, 0)), turn.prompt - 1)

    def remember(self, key: bytes, tokens: int) -> None:
        """Keep a line; what was used longest ago goes."""
        self.held += tokens - self.kept.pop(key, 0)
        self.kept[key] = tokens
        while self.held > self.cache_tokens and len(self.kept) > 1:
            self.held -= self.kept.popitem(last=False)[1]

    def rates(self) -> tuple[float, float]:
        """(prompt tokens/s, tokens/s of each answer) now."""
        n = len(self.writing)
        reads = self.reading is not None
        share = (_PREFILL_SHARE if n else 1.0) if reads else 0.0
        return self.costs.prefill_tok_s * share, (1 - share) / self.costs.step_s(n) if n else 0.0

    def next_s(self) -> float:
        """When something ends here, if nothing comes."""
        read, write = self.rates()
        ends = [self.reading.left / read] if self.reading is not None else []
        ends += [min(t.left for t in self.writing) / write] if self.writing and write else []
        return self.now_s + max(0.0, min(ends)) if ends else math.inf

    def advance(self, to_s: float) -> None:
        """Let time pass."""
        read, write = self.rates()
        spent = to_s - self.now_s
        if self.reading is not None:
            self.reading.left -= spent * read
        for turn in self.writing:
            turn.left -= spent * write
        self.now_s = to_s

    def begin(self) -> None:
        """Take the next prompt, if there is room."""
        if self.reading is None and self.queue and len(self.writing) < _SLOTS:
            self.reading = turn = self.queue.popleft()
            turn.cached = self.look_up(turn)
            turn.left = turn.prompt - turn.cached

    def ended(self) -> tuple[list[Turn], list[Turn]]:
        """(those whose first token has just come, those whose last has)."""
        first, last = [], [t for t in self.writing if t.left <= 1e-6]
        self.writing = [t for t in self.writing if t.left > 1e-6]
        if self.reading is not None and self.reading.left <= 1e-6:
            turn, self.reading = self.reading, None
            self.remember(turn.app, turn.system)
            self.remember(turn.chain.hashes[1], turn.prompt)
            turn.left = float(turn.answer)
            self.writing.append(turn)
            first = [turn]
        for turn in last:
            self.remember(turn.chain.hashes[1], turn.prompt + turn.answer)
        return first, last


def _about(rng: random.Random, median: float, spread: float = 0.7) -> int:
    return max(1, round(median * math.exp(rng.gauss(0, spread))))


def _hash(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def life(person: int, seed: int) -> Iterator[tuple[float, Turn]]:
    """(seconds after the answer before, what is asked then), for ever: one conversation after the other."""
    rng = random.Random(_hash(seed, person))
    kind = rng.choices(KINDS, [k.share for k in KINDS])[0]
    pause = rng.random() * (kind.away_s + kind.turns * kind.think_s)
    for conversation in itertools.count():
        app = _hash(kind, rng.randrange(kind.apps))
        used, known, hashes = kind.system, 0, [app]
        while True:
            used += _about(rng, kind.first if len(hashes) == 1 else kind.question)
            hashes.append(_hash(person, conversation, len(hashes)))
            answer = _about(rng, kind.answer, 0.5)
            yield pause, Turn(person, PrefixHashes(tuple(hashes), 1), app, kind.system, used, known, answer)
            used += answer
            known = used
            if rng.random() < 1 / kind.turns:
                break
            pause = _about(rng, 10 * kind.think_s) / 10
        pause = float(_about(rng, kind.away_s))


@dataclass
class Outcome:
    """Prompt tokens in all, known anywhere before, and not read again; first tokens in seconds; turns answered."""

    prompt: int = 0
    known: int = 0
    cached: int = 0
    ttft_s: list[float] = field(default_factory=list)
    turns: int = 0


def simulate(
    costs: Costs, n_boxes: int, people: int, *, route: str, seconds: float, cache_tokens: int, seed: int = 1
) -> Outcome:
    """`people` on `n_boxes` for so long. `route`: "prefix" or "round robin"."""
    machines = {f"{i}": Machine(costs, cache_tokens) for i in range(n_boxes)}
    boxes = [PoolNode(name, name) for name in machines]
    pool, turnstile = NodePool(boxes), itertools.cycle(boxes)
    lives = [life(p, seed) for p in range(people)]
    # (when, order, whom it concerns: a turn that is sent, or the box's name and the version of its plan)
    events: list[tuple[float, int, Turn | tuple[str, int]]] = []
    order, versions = itertools.count(), dict.fromkeys(machines, 0)
    seen: set[bytes] = set()
    found = Outcome()
    place: dict[int, PoolNode] = {}

    def come(person: int, after_s: float) -> None:
        pause, turn = next(lives[person])
        turn.sent_s = after_s + pause
        heapq.heappush(events, (turn.sent_s, next(order), turn))

    def look(name: str) -> None:
        machine = machines[name]
        machine.begin()
        versions[name] += 1
        heapq.heappush(events, (machine.next_s(), next(order), (name, versions[name])))

    for person in range(people):
        come(person, 0.0)
    while events:
        at_s, _, what = heapq.heappop(events)
        if at_s > seconds:
            break
        if isinstance(what, Turn):
            box = next(turnstile) if route == "round robin" else pool.pick(what.chain)
            assert box is not None
            pool.affinity.record(what.chain.hashes, box.name)
            box.active += 1
            place[what.person] = box
            if not what.known_tokens and what.app in seen:
                what.known_tokens = what.system
            seen.add(what.app)
            machines[box.name].advance(at_s)
            machines[box.name].queue.append(what)
            look(box.name)
            continue
        name, version = what
        if version != versions[name]:
            continue
        machines[name].advance(at_s)
        first, last = machines[name].ended()
        for turn in first:
            found.prompt += turn.prompt
            found.known += turn.known_tokens
            found.cached += turn.cached
            found.ttft_s.append(at_s - turn.sent_s)
        for turn in last:
            place.pop(turn.person).active -= 1
            found.turns += 1
            come(turn.person, at_s)
        look(name)
    return found


def predicted(device_name: str, model_name: str) -> Costs:
    """What the planner expects of `model_name` on `device_name`, at 2,000 tokens of context."""
    from localllm.device.named import resolve
    from localllm.library.catalog import load_catalog
    from localllm.planner import speed

    device, model = resolve(device_name), load_catalog().by_id[model_name]
    variant = next((v for v in model.variants if v.quant == "Q4_K_M"), model.variants[0])
    rates = [(n, speed.decode(device, model, variant, depth=2048, n_sequences=n).value) for n in (1, 2, 4, 8, 16)]
    return Costs(speed.prefill(device, model, variant).value, tuple((n, 1 / rate) for n, rate in rates))


def measured(file: Path) -> Costs:
    """What `bench --full --json` found."""
    full = json.loads(file.read_text(encoding="utf-8"))["full"]
    prefill = max(row["prefill_tok_s"] for row in full["depths"])
    return Costs(prefill, tuple((row["streams"], row["streams"] / row["together_tok_s"]) for row in full["streams"]))


def main() -> None:
    """Simulate every size with both routes, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", default="1,4,32")
    parser.add_argument("--people", default="10,300,10000")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--costs", type=Path, default=None)
    parser.add_argument("--device", default="rtx 4090")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--cache-tokens", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    costs = measured(given.costs) if given.costs else predicted(given.device, given.model)
    numbers: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    steps = ", ".join(f"{n} streams {1e3 * s:.1f} ms" for n, s in costs.steps)
    print(f"a box: {costs.prefill_tok_s:,.0f} prompt tokens/s; a step of {steps}; {given.cache_tokens:,} tokens kept")
    print(f"{'boxes':>6}{'people':>8}  {'route':12}{'known':>8}{'of ideal':>10}{'TTFT p50':>10}{'p95':>9}{'turns':>9}")
    rows = []
    for n_boxes, people in itertools.product(numbers(given.boxes), numbers(given.people)):
        for route in ("prefix", "round robin"):
            o = simulate(
                costs, n_boxes, people, route=route, seconds=60 * given.minutes, cache_tokens=given.cache_tokens,
                seed=given.seed,
            )  # fmt: skip
            times = sorted(o.ttft_s) or [math.nan]
            p50, p95 = statistics.median(times), times[int(0.95 * (len(times) - 1))]
            hit, ideal = o.cached / max(1, o.prompt), o.cached / max(1, o.known)
            print(
                f"{n_boxes:>6}{people:>8,}  {route:12}{hit:>8.1%}{ideal:>10.1%}{p50:>8.2f} s{p95:>7.1f} s{o.turns:>9,}",
                flush=True,
            )
            rows.append({"boxes": n_boxes, "people": people, "route": route, "known": hit, "of_ideal": ideal,
                         "ttft_p50_s": p50, "ttft_p95_s": p95, "turns": o.turns})  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
