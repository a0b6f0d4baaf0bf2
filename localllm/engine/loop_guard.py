"""The loop guard: says when an answer has become periodic, the same tokens over and over.

The definition is that of vLLM's `repetition_detection`: the answer's last tokens are one pattern of min_pattern_size to
max_pattern_size tokens, min_count times in a row. Exact, and one comparison of a short array per token.
"""

from __future__ import annotations

import numpy as np

from localllm.engine.messages import LoopLimits


class LoopGuard:
    """Watches one answer. Tokens of the prompt are none of its business."""

    def __init__(self, limits: LoopLimits) -> None:
        self._most = limits.max_pattern_size
        sizes = np.arange(1, self._most + 1)
        # For each size, how many tokens in a row equal the one that many before them; and how many are a loop.
        self._runs = np.zeros(self._most, dtype=np.int64)
        self._needed = sizes * (limits.min_count - 1)
        self._needed[: limits.min_pattern_size - 1] = np.iinfo(np.int64).max
        # The tokens before, the newest first.
        self._before = np.full(self._most, -1, dtype=np.int64)

    def loops(self, token: int) -> bool:
        """Take the answer's next token; True when it completes a loop."""
        self._runs += 1
        self._runs[self._before != token] = 0
        self._before[1:] = self._before[:-1].copy()
        self._before[0] = token
        return bool((self._runs >= self._needed).any())
