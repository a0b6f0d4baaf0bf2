"""The engine: requests in, steps, events out. Knows the backend contract and no backend; runs in a
worker process.

Here is what it can be told when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.engine.cache.tunables import DISK_FREE_BYTES

if TYPE_CHECKING:
    from localllm.engine.sampling.grammar import MakeMatcher
    from localllm.limited_child import Stages


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`queue_limit` requests of a tenant may wait;
    `cache_bytes` of exported prefixes are kept in memory, and `disk_bytes` of them under `disk_dir`
    (None: none). Of that disk `disk_free_bytes` are left to others, `disk_daily_bytes` may be
    written in a day (0: no limit), and people know what is there by `model_name`.
    `draft`: off, ngram, or auto (every drafter at hand).
    `headroom_bytes` of the system's memory are left to others (None: by the machine's size; 0: no
    guard);
    `planned_bytes` of it are what loading takes (0: unknown), which whoever loads has checked.
    `sliced_prefill_tokens`: prompts with more than that to read are read in slices while others
    decode, where the backend can (0: never).
    `grammar_trials`: where a grammar is tried before it is made (engine/sampling/grammar.py).
    `yields_threads`: decode takes fewer threads while other programs want the processors.
    `gap_s`: how much longer streams on a device may wait for their next token while a prompt is
    read beside them, or one of their steps if that is longer.
    `power`: the share of the time that is computed in; for the rest of it the engine waits behind
    each step."""

    queue_limit: int = 64
    cache_bytes: int = 2**30
    disk_dir: str | None = None
    disk_bytes: int = 8 * 10**9
    disk_free_bytes: int = DISK_FREE_BYTES
    disk_daily_bytes: int = 0
    model_name: str = ""
    draft: str = "off"
    headroom_bytes: int | None = None
    planned_bytes: int = 0
    sliced_prefill_tokens: int = 512
    make_matcher: MakeMatcher | None = None
    grammar_trials: Stages | None = None
    yields_threads: bool = False
    gap_s: float = 0.02
    power: float = 1.0
