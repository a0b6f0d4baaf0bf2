"""What goes into the next step: pure decisions over counts of tokens. Touches no tensor, no
backend, no clock.

A step is one sweep over the weights. Every decoding sequence gets its next token (and its draft);
what is left of the batch goes to prefill. While somebody is decoding, prefill is cut into chunks
small enough that a step takes no longer than `STALL_RATIO` plain decode steps: a long prompt never
freezes another stream. (Where the backend can pause in the middle of a sweep, long prompts get
slices of time between the steps instead: prefill_slices.py.)
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from localllm.engine.averages import Average, PrefillSpeed

STALL_RATIO = 7.0
# On a device a step is short and a prompt's token cheap: no gap is longer than two steps, or than
# `_GAP_S`, which nobody sees.
_DEVICE_RATIO, _GAP_S = 2.0, 0.02
# A slice of time ends where it should, a chunk where it was guessed to: with the step behind it it
# may take longer than a step with a chunk. Where the steps themselves are slow it is still worth
# its while.
_SLICE_RATIO = 8.0
_LEAST_SLICE = 5.0
_MIN_CHUNK = 16
# Nobody decodes, but others read their prompts or wait, or a cancel has to wait for the end of the
# step: no step takes longer than this, once speed is known.
PROMPT_STEP_S = 0.35
# One prompt, nobody else, and its cancel ends the step in the middle: only who comes now waits for
# it. Each step costs its threads' waits for each other (on two busy cores 740 sleeps with SmolLM2
# and 540 with gemma-3-270m, however many tokens are in it): 3,000 tokens took 5 to 10 % longer in
# steps of 128 than of 512, which is what llama.cpp's own server takes.
SINGLE_STEP_S = 4.0
_PROMPT_CHUNK, _DEVICE_CHUNK = 128, 512
# llama.cpp's attention on a CPU computes tiles of so many tokens, full or not.
_TILE = 64
# A dearer token is believed sooner than a cheaper one: what a token costs grows with the depth it
# is read at (5 % per chunk, early in a long prompt), and a chunk too large is a stall while one too
# small costs little.
_SMOOTHING = 0.2
_CAUTIOUS = 0.6
# A decode step costs the median of so many with as many sequences: a few slow ones (a buffer that
# grew, another program, a long prompt that is tokenised) are no measure of the next, and in an
# average they made everybody wait a quarter longer.
_STEPS, _FEWEST_STEPS = 31, 5
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


def plan_step(wants: Seq[Want], limits: Limits) -> list[Grant]:
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


def _prefill_grants(prefilling: Seq[Want], used: int, limits: Limits) -> list[Grant]:
    """Grants for prompts in a step of which decodes have `used` tokens and rows of logits."""
    grants: list[Grant] = []
    rows = limits.n_outputs - used
    shared = used > 0
    room = min(limits.n_batch - used, limits.n_batch if shared else limits.prompt_only)
    for want in prefilling:
        # A prompt with a few tokens left is as impatient as a decoding stream: it is not made to
        # wait for a long one.
        is_short = want.prefill <= _MIN_CHUNK
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


def _share(wanted: Seq[int], budget: int) -> list[int]:
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


def admission_order(waiting: Seq[Want]) -> list[str]:
    """Keys, least to read first, with age counted against that, within a tenant; the tenant that
    has had least first."""
    return [w.key for w in sorted(waiting, key=_rank)]


def _rank(want: Want) -> tuple[bool, int, float]:
    """Between tenants age does not count: a long queue would make its owner's requests old, and so
    the next. But what waits behind all others (a priority below 0, until it has waited long) does
    so across tenants too."""
    mine = want.prefill - want.waited_s * _AGE_TOKENS_PER_S
    return (False, 0, mine) if want.computed is None else (want.waited_s < 0, want.computed, mine)


class ChunkSizer(PrefillSpeed):
    """Learns what a decode step and a prefill token cost here, beside decoding and alone, and says
    how large a chunk may be. `gap_s`: on a device, how long a step with a chunk may take, or two
    plain steps if that is longer."""

    def __init__(self, n_batch: int, *, on_device: bool = False, gap_s: float = _GAP_S) -> None:
        self._n_batch, self._on_device, self._gap_s = n_batch, on_device, gap_s
        # (sequences, seconds) of the last plain decode steps
        self._decodes: deque[tuple[int, float]] = deque(maxlen=_STEPS)
        self._decode_s: float | None = None
        # What a prompt's token costs alone, and beside streams: a device has much to spare there.
        self._alone_s, self._beside_s = (
            Average(_SMOOTHING, rising=_CAUTIOUS),
            Average(_SMOOTHING, rising=_CAUTIOUS),
        )

    @property
    def chunk(self) -> int:
        """Prefill tokens allowed in a step that also decodes."""
        token_s = self._beside_s.value or self._alone_s.value
        if self._decode_s is None or not token_s:
            return min(self._n_batch, 2 * _MIN_CHUNK)
        others_s = (STALL_RATIO - 1.0) * self._decode_s
        if self._on_device:
            others_s = max((_DEVICE_RATIO - 1.0) * self._decode_s, self._gap_s - self._decode_s)
        tokens = int(others_s / token_s)
        # What begins a tile pays for the whole of it, on a device at least.
        tokens = tokens // _TILE * _TILE if self._on_device and tokens >= _TILE else tokens
        return max(_MIN_CHUNK, min(self._n_batch, tokens))

    def slice_s(self, last_step_s: float) -> float:
        """Seconds of other work that may come before the next decode step, which will take about as
        long as the last."""
        if self._decode_s is None:
            return PROMPT_STEP_S / _SLICE_RATIO
        return max(_SLICE_RATIO * self._decode_s - last_step_s, _LEAST_SLICE * self._decode_s)

    def prompt_tokens(self, step_s: float) -> int:
        """Prefill tokens allowed in a step that decodes nothing and may take `step_s`; on a device,
        which gains by large ones, longer."""
        least, step_s = (
            (_DEVICE_CHUNK, max(step_s, SINGLE_STEP_S))
            if self._on_device
            else (_PROMPT_CHUNK, step_s)
        )
        tokens = int(step_s * (self.prefill_tok_s or 0.0)) // _TILE * _TILE
        return min(self._n_batch, max(least, tokens))

    def observe(self, *, decoded: int, prefilled: int, seconds: float) -> None:
        """Learn from a finished step."""
        if decoded and not prefilled:
            self._decodes.append((decoded, seconds))
            alike = [s for n, s in self._decodes if n == decoded]
            self._decode_s = statistics.median(
                alike if len(alike) >= _FEWEST_STEPS else [s for _, s in self._decodes]
            )
        elif prefilled >= _MIN_CHUNK:
            base = self._decode_s if decoded and self._decode_s else 0.0
            learnt, other = (
                (self._beside_s, self._alone_s) if decoded else (self._alone_s, self._beside_s)
            )
            learnt.value = learnt.value or other.value
            learnt.add(max((seconds - base) / prefilled, 1e-9))

    @property
    def prefill_tok_s(self) -> float | None:
        token_s = self._alone_s.value or self._beside_s.value
        return 1.0 / token_s if token_s else None


# How far below the others a newcomer begins, in tokens: a chat's prompt and its answer.
CREDIT_TOKENS = 2048


@dataclass
class Shares:
    """Shares the engine evenly between tenants (keys with names): the tokens computed for each
    since the engine began.

    Who has had least is next. A newcomer begins `CREDIT_TOKENS` below the least of those at work,
    so that short requests of somebody who asks seldom go first, and nobody saves up more than that
    by staying away."""

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
        if tenant in self._present:
            self.computed[tenant] += n_tokens

    def remain(self, tenants: Iterable[str]) -> None:
        """Only these have requests now."""
        self._present &= set(tenants)

    @property
    def shared(self) -> bool:
        """True while more than one of them has requests."""
        return len(self._present) > 1

    def computed_for(self, tenant: str) -> int | None:
        """What was computed for `tenant`; None while there is nobody to share with."""
        return self.computed.get(tenant, 0) if self.shared else None

    def has_less(self, tenant: str, other: str) -> bool:
        """True where `tenant` has had less than `other`, and both are here."""
        return self.shared and self.computed.get(tenant, 0) < self.computed.get(other, 0)

    def preempted(self, for_: str, running: Iterable[str]) -> str | None:
        """The tenant that gives one of its places among the `running` (one entry for each request)
        to a request of
        `for_`: the one with most, where it has at least two more. None: nobody has to."""
        counts: dict[str, int] = {}
        for tenant in running:
            counts[tenant] = counts.get(tenant, 0) + 1
        if not counts:
            return None
        most = max(counts, key=lambda t: (counts[t], self.computed.get(t, 0)))
        # Afterwards it still has at least as many: no two of them take a place from each other by
        # turns.
        return most if counts[most] >= counts.get(for_, 0) + 2 else None
