"""How wide a predicted speed's 80 % range is: by where it runs, what runs, and how much was
measured of that.

A width is exp(base + Σ of the strata that apply), as coefficients are (efficiency.toml,
`[*.width]`): ln of high ÷ predicted. benchmarks/planner_fit/ranges.py finds the strata's shares
from errors of machines and sources that the law had not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from localllm.planner import efficiency
from localllm.planner.streams import facts
from localllm_catalog.types import Model, Variant

# From so many tokens of context on attention counts, and from so many on it is most of a step.
DEEP, VERY_DEEP = 8_192, 65_536
# Ranges are no narrower and no wider than this (ln).
_LEAST, _MOST = 0.06, 1.2
# What is asked less often, or not measured: never known better for it.
WIDENING = (
    "several cards", "quantised KV", "deep", "very deep", "rare format", "latent KV",
    "unseen part", "unseen kind", "unseen engine",
)  # fmt: skip
# Formats of a class that few published rows have.
_RARE_FORMATS = ("iq", "k23", "mlx2", "mlx3", "f16", "bf16", "mlx16")


def strata(
    model: Model,
    variant: Variant,
    hardware_keys: Sequence[str],
    *,
    depth: int,
    kv_type: str = "f16",
    n_cards: int = 1,
) -> tuple[str, ...]:
    """What a prediction's certainty goes by, but how much was measured: the machine's keys, and
    what is asked."""
    known = facts(model)
    return _named(
        tuple(hardware_keys),
        model.experts is not None,
        known.has_mla,
        known.n_recurrent_layers > 0,
        depth >= DEEP,
        depth >= VERY_DEEP,
        kv_type not in ("f16", "bf16", "f32"),
        n_cards > 1,
        efficiency.quant_class(variant) in _RARE_FORMATS,
    )


_STRATA = (
    "MoE",
    "latent KV",
    "recurrent",
    "deep",
    "very deep",
    "quantised KV",
    "several cards",
    "rare format",
)


@lru_cache(maxsize=4096)
def _named(hardware_keys: tuple[str, ...], *so: bool) -> tuple[str, ...]:
    where = tuple(key for key in hardware_keys if not key.startswith("part:"))
    return (*where, *(name for name, is_so in zip(_STRATA, so, strict=True) if is_so))


def evidence(rows: Mapping[str, int], hardware_keys: Sequence[str]) -> tuple[str, ...]:
    """What is missing of measurements (`rows` by key): "unseen part", "unseen kind" (generation),
    "unseen engine"."""
    generation = [key for key in hardware_keys if "-" in key and not key.startswith("part:")]
    missing = {
        "unseen part": not any(rows.get(key) for key in hardware_keys if key.startswith("part:")),
        "unseen kind": not any(rows.get(key) for key in generation),
        "unseen engine": not rows.get(hardware_keys[0]),
    }
    return tuple(name for name, is_so in missing.items() if is_so)


def width(shares: Mapping[str, float], applying: Sequence[str]) -> float:
    """ln of an 80 % range's upper end ÷ the prediction, where these strata apply."""
    usual = shares.get("base", math.log(0.6)) + sum(
        shares.get(name, 0.0) for name in applying if name not in WIDENING
    )
    wider = sum(max(0.0, shares.get(name, 0.0)) for name in applying if name in WIDENING)
    return min(_MOST, max(_LEAST, math.exp(usual)) * math.exp(wider))
