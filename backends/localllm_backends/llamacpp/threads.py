"""How many threads compute the steps of one llama_context: all of them, or for short steps as few as others leave."""

from __future__ import annotations

from typing import Any

# With more tokens than this a step computes long between its barriers: the more threads the better, whoever else there is.
_SHORT_TOKENS = 32


class Threads:
    """Of `context`, which was made with as many as it may have."""

    def __init__(self, llama: Any, context: Any) -> None:
        self._llama, self._context = llama, context
        self._all = int(llama.llama_n_threads(context)), int(llama.llama_n_threads_batch(context))
        self._now, self._few = self._all, max(self._all)

    def use(self, most: int) -> None:
        """Short steps take no more than `most` from now on."""
        self._few = max(1, most)

    def ready(self, n_tokens: int) -> None:
        """A step of `n_tokens` is computed next."""
        one, many = self._all
        wanted = (min(one, self._few), min(many, self._few)) if n_tokens <= _SHORT_TOKENS else self._all
        if wanted != self._now:
            self._llama.llama_set_n_threads(self._context, *wanted)
            self._now = wanted
