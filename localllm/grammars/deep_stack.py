"""Runs llguidance on a deep stack.

It recurses for each rule that leads to another, and a stack overflow kills the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from localllm.errors import UnsupportedError

Made = TypeVar("Made")
# Approximate number of rules, properties and items. A typical large grammar has a thousand. At this
# limit, compilation takes a second or more.
_MAX_PARTS = 50_000
# Measured with llguidance 1.9: 4 kB per Lark rule, 10 kB per `$ref` to a definition, 0.4 kB per
# property of one object. Only touched pages use memory. Half of this size was enough for chains of
# 25,000 rules and of 8,000 definitions.
_STACK_BYTES = 128 * 2**20
_LOCK = threading.Lock()


def check_parts(grammar: str) -> None:
    """Raise UnsupportedError if a grammar's text has too many parts."""
    n_parts = sum(grammar.count(mark) for mark in "\n,:")
    if n_parts > _MAX_PARTS:
        raise UnsupportedError(
            f"the constraint has about {n_parts:,} rules, properties and items; the "
            f"limit is {_MAX_PARTS:,}",
            hint="send a smaller constraint, or ask for JSON without a schema",
        )


def on_deep_stack(grammar: str, work: Callable[[], Made]) -> Made:
    """Run `work` on a thread with a deep stack and return its result.

    Raises the errors of `work`, and UnsupportedError if the grammar's text has too many parts.
    """
    check_parts(grammar)
    with ThreadPoolExecutor(1, "grammar") as pool:
        with _LOCK:
            previous_bytes = threading.stack_size(_STACK_BYTES)
            try:
                future = pool.submit(work)
            finally:
                threading.stack_size(previous_bytes)
        return future.result()
