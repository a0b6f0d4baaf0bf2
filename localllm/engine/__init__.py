"""The engine takes requests, runs steps and returns events.

It runs in a worker process. It uses the backend contract and knows no particular backend. This
module has the settings of an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.engine.cache.tunables import DISK_FREE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from localllm.engine.sampling.grammar import MakeMatcher
    from localllm.limited_child import Stages


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine.

    - `queue_limit`: requests of one tenant that may wait.
    - `cache_bytes`: memory for exported prefixes.
    - `disk_dir`: folder of the disk cache (None: no disk cache).
    - `disk_bytes`: size limit of the disk cache.
    - `disk_free_bytes`: disk space that the cache leaves free.
    - `disk_daily_bytes`: bytes that may be written to disk in a day (0: no limit).
    - `model_name`: the name that the disk cache shows to users.
    - `draft`: off, ngram, or auto (every available drafter).
    - `headroom_bytes`: system memory to leave free (None: depends on the machine's size; 0: no
      guard).
    - `planned_bytes`: memory that loading takes (0: unknown). The caller has checked it before
      loading.
    - `sliced_prefill_tokens`: longer prompts are read in slices while other requests decode, if the
      backend supports it (0: never).
    - `grammar_trials`: the stages that test a grammar before it is compiled
      (engine/sampling/grammar.py).
    - `yields_threads`: decode with fewer threads while other programs use the processors.
    - `gap_s`: on a device, how much longer a stream may wait for its next token while a prompt is
      read. If one of the stream's own steps takes longer, that time applies instead.
    - `power`: share of the time spent computing. The engine pauses after each step for the rest.
    - `prefill_from`: addresses of servers that are asked for KV (engine/transfer/).
    - `kv_from`: addresses of servers of the same pool, from which KV of system prompts is copied.
    - `prefill_key`: the key that the servers of `prefill_from` and `kv_from` require.
    - `prefill_from_tokens`: prompts with at least this many uncached tokens are always read by these
      servers (0: the learnt costs decide).
    - `prefill_patience_s`: a block of KV is never late before this long after its expected time.
    - `say`: reports a sentence to the owner of the server.
    """

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
    prefill_from: Sequence[str] = ()
    kv_from: Sequence[str] = ()
    prefill_key: str | None = None
    prefill_from_tokens: int = 0
    prefill_patience_s: float = 0.25
    say: Callable[[str], object] = print
