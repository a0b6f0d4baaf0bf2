"""Lines that nobody runs leave the context before a prompt is read there, not piece by piece beside it.

In a unified KV cache a prompt's attention computes every cell up to the highest that is held, whoever holds it, and new
tokens go behind what is there: 1,400 tokens of SmolLM2 behind a line of 3,000 that nobody asked for took 6.5 s instead of
5.2, behind one of 1,400 5.6 s. A line that is in the cache leaves at once; another is exported first, which took 50 ms there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localllm.engine.request_table import RequestTable
from localllm.engine.scheduler import LONE_STEP_S
from localllm_backends.contract import Capabilities

# A cell that leaves saves each token of the prompt its attention over it; it costs its copy. For SmolLM2, with three heads to
# each of K and V, 60 to 100 tokens outweigh it; models with more heads to each need fewer.
_LEAST_TOKENS = 128
# It may take this part of what the prompt itself takes, as far as is known, and no longer than a step beside which others wait.
_MOST_SHARE = 0.1
# However a clock goes.
_MOST_PIECES = 64


@dataclass
class IdleEviction:
    """Makes room before the steps of `jobs`, in the context of a backend that is able to do what `able` says."""

    jobs: RequestTable
    able: Capabilities
    clock: Callable[[], float]

    def clear(self, prefill_tok_s: float | None) -> None:
        """Before a step. `prefill_tok_s`: how fast prompts are read here (None: not known yet)."""
        pool, running = self.jobs.pool, self.jobs.running
        if not running or not pool.residents:
            return
        pool.leave()
        # Where sequences have cells of their own nobody is in another's way, and a device's are dear to copy.
        if not self.able.shares_cells or self.able.kv_on_device or self.jobs.decoding:
            return
        n_tokens = sum(job.to_compute for job in running.values())
        if n_tokens < _LEAST_TOKENS:
            return
        seconds = LONE_STEP_S if prefill_tok_s is None else min(LONE_STEP_S, _MOST_SHARE * n_tokens / prefill_tok_s)
        begun = self.clock()
        for _ in range(_MOST_PIECES):
            if not pool.tick(busy=True, live=len(running)) or self.clock() - begun >= seconds:
                return
