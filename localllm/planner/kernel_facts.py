"""Load the table of each engine's kernels (kernels.toml): one row of facts for a machine's keys."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("kernels.toml")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Properties of a set of kernels on a kind of machine. The defaults are the usual values.
    Shares are of the usual rate.

    - `by_vendor`: drivers of several vendors run it.
    - `emulated_on_generations`, `emulated_on_parts`: keys of emulated features, by the generations
      that lack them or a pattern of the parts' names.
    - `masked`, and `masked_large` in large micro-batches: shares of the masked tokens that are
      computed all the same (later tokens, tokens before the window).
    - `reads_mask`: the host writes a mask.
    - `read_share`: rate of reading weights for one token, except formats in `read_fast`.
    - `bf16_share`, `bf16_experts_share`: rate of multiplying bfloat16 matrices, and of reading
      routed experts in bfloat16.
    - `unpack_flops`: FLOPs per weight beyond the usual, at the units' nominal rate, by class of
      format.
    - `matrix_share`, `attention_share`: rates of multiplying matrices, and of a prompt's attention.
    - `expert_tile`: rows that each expert used by a micro-batch costs in addition to its tokens (0:
      fitted). `short_expert_tile`: the same if experts get fewer tokens than `expert_tile` on
      average (0: no difference).
    - `unpacks_kv_on_lanes`: one token's attention unpacks a quantised KV on the plain FP32 lanes.
    - `row_speed`: rate of the rows of a draft, in rates of the plain lanes.
    - `tflops_per_unit`: FP16 TFLOP/s of a compute unit (0: as nominal).
    - `most_batch`: most tokens of a step.
    """

    by_vendor: bool = False
    emulated_on_generations: Mapping[str, list[str]] = field(default_factory=dict)
    emulated_on_parts: Mapping[str, str] = field(default_factory=dict)
    masked: tuple[float, float] = (1.0, 1.0)
    masked_large: tuple[float, float] | None = None
    reads_mask: bool = True
    read_share: float = 1.0
    read_fast: tuple[str, ...] = ()
    bf16_share: float = 1.0
    bf16_experts_share: float = 1.0
    unpack_flops: Mapping[str, float] = field(default_factory=dict)
    matrix_share: float = 1.0
    attention_share: float = 1.0
    expert_tile: float = 0.0
    short_expert_tile: float = 0.0
    unpacks_kv_on_lanes: bool = False
    row_speed: float = 1.0
    tflops_per_unit: float = 0.0
    most_batch: float = math.inf


@cache
def _rows() -> dict[str, dict[str, Any]]:
    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))
    for row in rows.values():
        row |= {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return rows


@lru_cache(maxsize=1024)
def facts(keys: tuple[str, ...]) -> KernelFacts:
    """Return the facts of a machine with these keys, general first."""
    fields: dict[str, Any] = {}
    for key in keys:
        fields |= _rows().get(key, {})
    return KernelFacts(**fields)
