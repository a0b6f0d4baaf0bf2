"""Why tokens that were known once are computed again: counted by reason, and in words. Pure functions of counts."""

from __future__ import annotations

from collections.abc import Callable

from localllm.engine.cache.store import MIN_TOKENS
from localllm.engine.request import RunningRequest

_WORDS = {
    "evicted": "were evicted",
    "unread": "were quicker computed than read from disk",
    "lost": "were lost on disk",
    "no_cells": "did not fit the context",
    "short": "were too few to be copied",
    "no_snapshot": "have no snapshot this model could go on from",
}


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


def miss_reason(job: RunningRequest, again: dict[str, int], is_control: Callable[[int], bool]) -> str:
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
