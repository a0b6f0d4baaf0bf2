"""Recognise the config.json of a drafter that was trained for a model: EAGLE-3, DFlash, DSpark.

The layouts are those of z-lab (DFlash, DFlash2), of DeepSeek (DSpark), of SafeAILab and SGLang
(EAGLE-3), and of vLLM's speculators. MLX conversions keep the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# The architecture of DSpark drafters for Gemma 4. Their config has all fields on one level.
_GEMMA4_DSPARK = "Gemma4DSparkModel"
# Designs whose tokens are chosen one after another by a Markov head.
DSPARK_DESIGNS = ("dspark", "gemma4_dspark")
# Sizes above this are not those of a real drafter.
_LARGEST = 2**24


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Facts about a drafter in a folder.

    `kind`: see `Capabilities.draft_kind`. `design`: which of the layouts it has. `width` and
    `vocabulary`: hidden size and number of tokens of its model. `layers`: the model's layers whose
    outputs it reads, from 0 (empty: not stated). `block`: tokens of a block, with the newest one
    (0: it drafts token by token). `kv_elements`: numbers per token in its KV.
    """

    kind: Literal["eagle3", "dflash"]
    design: Literal["eagle3", "dflash", "dflash2", "dspark", "gemma4_dspark"]
    width: int
    vocabulary: int
    layers: tuple[int, ...]
    block: int
    kv_elements: int


def drafter_config(config: Mapping[str, Any]) -> DrafterConfig | None:
    """Return the facts in a `config.json`; None if it does not describe a drafter."""
    named = config.get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else []
    nested = config.get("dflash_config")
    if isinstance(nested, dict):
        return _of_block(config, nested, architectures)
    if _GEMMA4_DSPARK in architectures:
        return _of_block(config, {}, architectures)
    is_eagle3 = "eagle3" in (config.get("model_type"), config.get("speculators_model_type"))
    if is_eagle3 or any("eagle3" in name.lower() for name in architectures):
        return _of_eagle3(config)
    return None


def eagle3_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of an EAGLE-3 head's config that describes its layers."""
    nested = config.get("transformer_layer_config")
    return nested if isinstance(nested, dict) else config


def _of_eagle3(config: Mapping[str, Any]) -> DrafterConfig:
    text = eagle3_text(config)
    stated = config.get("eagle_config")
    own = stated if isinstance(stated, dict) else {}
    name = "eagle_aux_hidden_state_layer_ids"
    # The list has the layers whose inputs are read.
    inputs = _numbers(config.get(name) or own.get(name))
    return DrafterConfig(
        kind="eagle3",
        design="eagle3",
        width=_number(config.get("target_hidden_size")) or _number(text.get("hidden_size")),
        vocabulary=_number(text.get("vocab_size")),
        layers=tuple(layer - 1 for layer in inputs),
        block=0,
        kv_elements=_kv_elements(text),
    )


def _of_block(
    config: Mapping[str, Any], own: Mapping[str, Any], architectures: list[str]
) -> DrafterConfig:
    facts = {**config, **own}
    design: Literal["dflash", "dflash2", "dspark", "gemma4_dspark"] = "dflash"
    if "DFlash2DraftModel" in architectures:
        design = "dflash2"
    elif _GEMMA4_DSPARK in architectures:
        design = "gemma4_dspark"
    elif own.get("projector_type") == "dspark" or _number(facts.get("markov_rank")):
        design = "dspark"
    block = _number(facts.get("block_size"))
    # DSpark's checkpoints count the drafted tokens only.
    has_anchor = design == "dspark" and facts.get("dspark_bonus_anchor")
    if design in DSPARK_DESIGNS and not has_anchor:
        block += 1
    kv_elements = _kv_elements(config)
    if design == "gemma4_dspark":
        kv_elements = _gemma4_kv_elements(config)
    return DrafterConfig(
        kind="dflash",
        design=design,
        width=_number(config.get("hidden_size")),
        vocabulary=_number(config.get("vocab_size")),
        layers=_numbers(facts.get("target_layer_ids")),
        block=block,
        kv_elements=kv_elements,
    )


def _gemma4_kv_elements(config: Mapping[str, Any]) -> int:
    """Numbers per token in the KV of Gemma 4's layers: those of full attention have sizes of their
    own."""
    n_layers = max(1, _number(config.get("num_hidden_layers")))
    kinds = config.get("layer_types")
    n_sliding = 0
    if isinstance(kinds, list):
        n_sliding = min(kinds.count("sliding_attention"), n_layers)
    sliding_elements = _kv_elements({**config, "num_hidden_layers": 1})
    kv_heads = config.get("num_key_value_heads")
    if config.get("attention_k_eq_v"):
        kv_heads = config.get("num_global_key_value_heads") or kv_heads
    head_dim = config.get("global_head_dim") or config.get("head_dim")
    sizes = {"num_hidden_layers": 1, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    full_elements = _kv_elements({**config, **sizes})
    return n_sliding * sliding_elements + (n_layers - n_sliding) * full_elements


def _kv_elements(text: Mapping[str, Any]) -> int:
    n_heads = _number(text.get("num_attention_heads"))
    kv_heads = _number(text.get("num_key_value_heads")) or n_heads
    head_dim = _number(text.get("head_dim"))
    if not head_dim:
        head_dim = _number(text.get("hidden_size")) // max(1, n_heads)
    return 2 * kv_heads * head_dim * max(1, _number(text.get("num_hidden_layers")))


def _number(value: object) -> int:
    """Return `value` if it is a plausible size, else 0."""
    if isinstance(value, int) and 0 < value <= _LARGEST:
        return int(value)
    return 0


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        return ()
    return tuple(value for value in values if isinstance(value, int))
