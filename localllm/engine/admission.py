"""What is decided about a request when it is admitted: whether to wait for another's prefix, why its own was not there,
and where its state must be stored on the way. Pure functions of the jobs' tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from localllm.engine.job import Job
from localllm.engine.residency import MIN_TOKENS, Source

# A prefix somebody is prefilling right now is waited for when it saves at least this much.
_WORTH_WAITING_TOKENS = 16
_WORDS = {
    "evicted": "were evicted",
    "unread": "were quicker computed than read from disk",
    "lost": "were lost on disk",
    "no_cells": "did not fit the context",
    "short": "were too few to be copied",
    "no_snapshot": "have no snapshot this model could go on from",
}


def prefix_in_progress(job: Job, source: Source, running: Iterable[Job]) -> bool:
    """True while a running prefill is computing tokens this job needs too: waiting beats prefilling them twice."""
    prompt = job.tokens
    for other in running:
        if not other.prefilling or not (job.shares and other.shares):
            continue
        ahead = min(len(other.tokens), len(prompt) - 1)
        shared = 0
        if other.tokens[:ahead] == prompt[:ahead]:
            shared = ahead
        elif ahead > source.length:
            a, b = np.asarray(other.tokens[:ahead]), np.asarray(prompt[:ahead])
            shared = int(np.argmax(a != b))
        if other.n_kv < shared and shared - source.length >= _WORTH_WAITING_TOKENS:
            return True
    return False


def recomputed(known: int, taken: int, missed: dict[str, int], *, whole: bool) -> dict[str, int]:
    """Tokens of a prompt that had their KV once and are computed now, by reason (`metrics.RECOMPUTED`): of `known` tokens
    `taken` are there, and `missed` says what became of some of the others."""
    lacking = known - taken
    found = {}
    for reason, n_tokens in missed.items():
        found[reason] = min(n_tokens, max(lacking, 0))
        lacking -= found[reason]
    if lacking > 0:
        rest = "short" if known < MIN_TOKENS else "no_snapshot" if whole else "evicted"
        found[rest] = found.get(rest, 0) + lacking
    return {reason: n for reason, n in found.items() if n}


def miss_reason(job: Job, again: dict[str, int], is_control: Callable[[int], bool]) -> str:
    """Why the rest of the prompt had to be computed, in words; "" when all of it was there. `again`: see `recomputed`."""
    most = job.n_prompt - 1
    if job.cached >= most:
        return ""
    if not job.shares:
        return "the request asked for no cache"
    if sum(again.values()) > MIN_TOKENS or (job.known >= most and again):
        return "; ".join(f"{n} known tokens {_WORDS[reason]}" for reason, n in again.items())
    if job.known == 0:
        return "nothing like it was seen before"
    turns = sum(1 for t in job.tokens[: job.known] if is_control(t))
    return f"diverged from what is cached at token {job.known} (after {turns} control tokens)"


def checkpoints(job: Job, is_control: Callable[[int], bool]) -> list[int]:
    """Where to store the state of a model that can't go back: before the last two turns of the prompt."""
    control = [i for i in range(job.n_prompt - 1, -1, -1) if is_control(job.tokens[i])]
    same = [i for i in control if job.tokens[i] == job.tokens[control[0]]][:2] if control else []
    return sorted(i for i in same if i > job.n_kv)
