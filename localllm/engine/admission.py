"""What is decided about a request when it is admitted: whether to wait for another's prefix, why its own was not there,
and where its state must be stored on the way. Pure functions of the jobs' tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from localllm.engine.job import Job
from localllm.engine.residency import Source

# A prefix somebody is prefilling right now is waited for when it saves at least this much.
_WORTH_WAITING_TOKENS = 16


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


def miss_reason(job: Job, is_control: Callable[[int], bool]) -> str:
    """Why the rest of the prompt had to be computed, in words; "" when all of it was there."""
    most = job.n_prompt - 1
    if job.n_kv >= most:
        return ""
    if not job.shares:
        return "the request asked for no cache"
    if job.known >= most or job.known > job.n_kv + 16:
        return f"{job.known - job.n_kv} known tokens were evicted"
    if job.known == 0:
        return "nothing like it was seen before"
    turns = sum(1 for t in job.tokens[: job.known] if is_control(t))
    return f"diverged from what is cached at token {job.known} (after {turns} control tokens)"


def checkpoints(job: Job, is_control: Callable[[int], bool]) -> list[int]:
    """Where to store the state of a model that can't go back: before the last two turns of the prompt."""
    control = [i for i in range(job.n_prompt - 1, -1, -1) if is_control(job.tokens[i])]
    same = [i for i in control if job.tokens[i] == job.tokens[control[0]]][:2] if control else []
    return sorted(i for i in same if i > job.n_kv)
