"""Recognises requests that no user waits for: titles, summaries and classifications of agents. They
run at low priority.

A header may name the purpose (http/client_signs.py). Programs that send no such header are recognised
by their requests: short ones without tools, beside a running request with tools of the same program.
Requests of unknown programs may be unrelated, so this does not hold for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.job import GenerationJob
from localllm.server.http.accounts import caller
from localllm.server.http.client_signs import SIGNS

# Priority of requests in the background: that of `service_tier` flex.
_FLEX = -1
# Titles, summaries and classifications have at most so many tokens.
_SHORT_TOKENS = 512


class RunningAgents:
    """Counts the running requests with tools, by key and program."""

    def __init__(self) -> None:
        self._running: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def running(self, task: object) -> Iterator[None]:
        """Context of one request."""
        key = _sender()
        agent = isinstance(task, ChatRequest) and bool(task.options.tools)
        self._running[key] += agent
        try:
            yield
        finally:
            self._running[key] -= agent
            if not self._running[key]:
                del self._running[key]

    def is_background(self, task: object) -> bool:
        """Return whether a request runs in the background. Raw prompts do not."""
        if not isinstance(task, ChatRequest):
            return False
        if SIGNS.get().background:
            return True
        limit = task.generation.max_tokens
        short = limit is not None and 0 < limit <= _SHORT_TOKENS
        known = bool(SIGNS.get().program)
        return known and short and not task.options.tools and self._running[_sender()] > 0


def with_priority(job: GenerationJob, *, background: bool) -> GenerationJob:
    """Return the job with the priority of a request in the background, unless its client chose
    one."""
    if job.generation.priority or not background:
        return job
    return replace(job, generation=replace(job.generation, priority=_FLEX))


def _sender() -> tuple[str, str]:
    return caller().name, SIGNS.get().program
