"""llguidance on a deep stack: it goes a level down for each rule that leads to another, and a
process whose stack ends dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from localllm.errors import UnsupportedError

Made = TypeVar("Made")
# Rules, properties and items, about. A thousand are many; at so many a second or more is spent.
_MOST_PARTS = 50_000
# Measured with llguidance 1.9: 4 kB a rule of Lark, 10 kB a `$ref` to a definition, 0.4 kB a
# property of one object; only what is touched becomes memory. Half of it was enough for chains of
# 25,000 rules, and of 8,000 definitions.
_STACK_BYTES = 128 * 2**20
_LOCK = threading.Lock()


def check_parts(grammar: str) -> None:
    """Raises UnsupportedError where a grammar's text has too many parts."""
    n_parts = sum(grammar.count(mark) for mark in "\n,:")
    if n_parts > _MOST_PARTS:
        raise UnsupportedError(
            f"the constraint has about {n_parts:,} rules, properties and items, and at most "
            f"{_MOST_PARTS:,} are taken",
            hint="send a smaller one, or ask for JSON without a schema",
        )


def on_deep_stack(grammar: str, work: Callable[[], Made]) -> Made:
    """What `work` makes of a grammar's text. Raises what it raises, and UnsupportedError for a text
    of too many parts."""
    check_parts(grammar)
    with ThreadPoolExecutor(1, "grammar") as pool:
        with _LOCK:
            before = threading.stack_size(_STACK_BYTES)
            try:
                made = pool.submit(work)
            finally:
                threading.stack_size(before)
        return made.result()
