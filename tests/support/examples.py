"""The number of examples that a property test draws: usually the same few in every run; in the long
lane, which draws new ones, three times as many."""

from __future__ import annotations

import os

NEW = os.environ.get("LOCALLLM_TEST_EXAMPLES") == "new"


def examples(n: int) -> int:
    """Return how many of `n` examples this run draws."""
    return n if NEW else max(n // 3, min(n, 10))
