"""A step that is no longer wanted is ended inside: llama.cpp asks between the nodes of its graph, on the CPU, whether to.

A large model reads a prompt at twenty tokens a second, so that a step takes many seconds; a request that is cancelled
should not hold the processor for the rest of one.
"""

from __future__ import annotations

from typing import Any

from localllm_backends.llamacpp.threads import Threads

# Asking costs a microsecond per node: nothing beside a step with so many tokens, a twentieth of a small model's with one.
_WORTH_TOKENS = 32
# llama_decode's word for it (llama.h).
ABORTED = 2


class Interrupts:
    """Ends a `decode` of one llama_context from another thread. `threads`: those that compute it."""

    def __init__(self, llama: Any, context: Any) -> None:
        self._llama, self._context = llama, context
        self.threads = Threads(llama, context)
        self._wanted = False
        self._asked = llama.ggml_abort_callback(lambda _: self._wanted)
        self._never = llama.ggml_abort_callback()

    def decode(self, batch: Any, *, can_end: bool = True) -> int:
        """llama_decode's code; `ABORTED` where `interrupt` was called meanwhile, and it `can_end` in the middle."""
        self.threads.ready(batch.n_tokens)
        long = can_end and batch.n_tokens >= _WORTH_TOKENS
        if long:
            self._llama.llama_set_abort_callback(self._context, self._asked, None)
        try:
            return int(self._llama.llama_decode(self._context, batch))
        finally:
            self._wanted = False
            if long:
                self._llama.llama_set_abort_callback(self._context, self._never, None)

    def interrupt(self) -> None:
        """End the `decode` that runs now, or the next one if none does, unless it is short. From any thread."""
        self._wanted = True
