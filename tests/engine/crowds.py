"""Compare random crowds of requests with isolated runs: an answer must not depend on other
requests, earlier or concurrent."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from engine.drive import GREEDY, Outcome, settle
from localllm.engine.core import Engine
from localllm_backends.contract import Backend, Chunk
from support.requests import request_for

# Kernels round differently for different batch shapes. A first divergence is therefore allowed if
# the gap between the two best logits of the isolated run is at most this share of the row's spread.
# The largest gap at which these models were seen to flip is 0.02; real errors are orders of
# magnitude larger.
NEAR_TIE = 0.05


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a crowd: generate `n` tokens after `prompt`, unless it is cancelled
    earlier."""

    key: str
    prompt: list[int]
    n: int
    cancelled: bool


@dataclass(slots=True)
class Tally:
    """Counts of a run of crowds: requests, first divergences at near ties, and other divergences
    (flips of a router)."""

    requests: int = 0
    ties: int = 0
    flips: int = 0


def isolated(backend: Backend, prompt: list[int], n: int) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of one isolated request that ignores the end of sequence, and the
    margin of each choice (gap between the two best logits divided by the row's spread)."""
    ends = list(backend.info.eog_tokens)
    sequence = backend.new_sequence()
    for i in range(0, len(prompt), backend.info.n_batch):
        result = backend.step([Chunk(sequence, prompt[i : i + backend.info.n_batch])])
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(n):
        row = result.logits(0)[-1].copy()
        spread = row.std()
        row[ends] = -np.inf
        second, best = np.partition(row, -2)[-2:]
        tokens.append(int(row.argmax()))
        gaps.append(float((best - second) / spread))
        result = backend.step([Chunk(sequence, [tokens[-1]])])
    backend.drop(sequence)
    return tokens, gaps


def message(rng: random.Random) -> list[int]:
    return [510, *(rng.randrange(3, 250) for _ in range(rng.choice([3, 20, 60])))]


def divergence(got: list[int], expected: list[int]) -> int | None:
    """Return the first index at which `got` differs from `expected`, or None."""
    return next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)


def crowd(
    engine: Engine, rng: random.Random, name: str, histories: list[list[int]]
) -> tuple[list[Asked], Outcome]:
    """Submit up to five requests that extend some of `histories`, at random moments, and step until
    all have ended."""
    outcome = Outcome()
    asked = []
    for i in range(rng.randint(1, 5)):
        prompt = [*rng.choice(histories)[: rng.choice([40, 150, 300])], *message(rng)]
        one = Asked(f"{name}-{i}", prompt, rng.randint(1, 20), rng.random() < 0.2)
        asked.append(one)
        request = request_for(one.key, prompt, max_tokens=one.n, sampling=GREEDY, ignore_eos=True)
        outcome.take(engine.submit(request, prompt))
        for _ in range(rng.randint(0, 4)):
            outcome.take(engine.step())
            engine.check_integrity()
        if one.cancelled:
            outcome.take(engine.cancel(one.key))
    while engine.has_work:
        outcome.take(engine.step())
    engine.check_integrity()
    return asked, outcome


def crowds_equal_isolated_runs(
    engine: Engine, alone: Backend, seed: str, mixes: int, *, router_flips: float
) -> Tally:
    """Serve `mixes` random crowds with `engine` and compare every answer with that of `alone`.
    `router_flips` is the share of requests that may differ although the choice was clear (0 for a
    model without a router)."""
    rng = random.Random(seed)
    histories = [message(rng) for _ in range(3)]
    tally = Tally()
    for mix in range(mixes):
        asked, outcome = crowd(engine, rng, str(mix), histories)
        if rng.random() < 0.5:
            settle(engine)
        for one in asked:
            assert len(outcome.ends[one.key]) == 1
            tally.requests += 1
            got = outcome.tokens.get(one.key, [])
            assert one.cancelled or len(got) == one.n
            expected, gaps = isolated(alone, one.prompt, one.n)
            at = divergence(got, expected)
            if at is not None:
                clear = gaps[at] > NEAR_TIE
                where = f"{one.key}: another token at {at}, where {gaps[at]:.3f} was clear"
                assert not clear or router_flips, where
                tally.ties, tally.flips = tally.ties + (not clear), tally.flips + clear
            elif not one.cancelled:
                histories[rng.randrange(3)] = [*one.prompt, *got][:400]
    assert tally.flips <= router_flips * tally.requests
    print(
        f"{seed}: {tally.ties} near ties, {tally.flips} router flips in {tally.requests} requests"
    )
    return tally
