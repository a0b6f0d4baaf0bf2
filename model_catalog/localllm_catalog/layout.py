"""Turns a family file's short shape facts (pattern, windows, recurrent sizes) into one Layer per layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from localllm_catalog.errors import BadCatalogError
from localllm_catalog.types import FfnKind, Layer, LayerKind

_TOKEN = re.compile(r"(full|sliding|mla|recurrent|none)(?:\*([1-9][0-9]{0,3}))?")


def expand_pattern(pattern: list[str], n_layers: int) -> list[LayerKind]:
    """["sliding*5", "full"] for 8 layers: sliding ×5, full, sliding ×2. A pattern as long as the model is used as is.

    Raises BadCatalogError for an unknown word or a pattern longer than the model.
    """
    kinds: list[LayerKind] = []
    for token in pattern:
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise BadCatalogError(
                f"{token!r} is not a layer pattern",
                'write "full", "sliding", "mla", "recurrent" or "none", with "*N" to repeat',
            )
        kinds += [cast(LayerKind, match[1])] * int(match[2] or 1)
    if not kinds or len(kinds) > n_layers:
        raise BadCatalogError(f"the pattern names {len(kinds)} layers, the model has {n_layers}")
    return [kinds[i % len(kinds)] for i in range(n_layers)]


def recurrent_sizes(facts: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """(state elements, mixer weights) of one recurrent layer of `kind` gated_delta, mamba2, short_conv or kda.

    State: https://github.com/ggml-org/llama.cpp src/llama-hparams.cpp (n_embd_r + n_embd_s). Weights: the layers of
    https://github.com/ml-explore/mlx-lm models/{qwen3_next,nemotron_h,lfm2,bailing_moe_v3}.py, 0.32.2.
    """
    kind = facts["kind"]
    conv = int(facts["conv"])
    if kind == "short_conv":
        return hidden * (conv - 1), hidden * 3 * hidden + hidden * conv + hidden * hidden
    if kind == "gated_delta":
        state = int(facts["state"])
        value_heads, key_heads = int(facts["value_heads"]), int(facts["key_heads"])
        values, keys = value_heads * state, key_heads * state
        channels = values + 2 * keys
        weights = hidden * (channels + values + 2 * value_heads) + channels * conv + values * hidden + 2 * value_heads
        return (conv - 1) * channels + state * values, weights + state
    if kind == "mamba2":
        inner, state, groups, heads = (int(facts[key]) for key in ("inner", "state", "groups", "heads"))
        channels = inner + 2 * groups * state
        weights = hidden * (inner + channels + heads) + channels * (conv + 1) + inner * hidden + inner + 3 * heads
        return (conv - 1) * channels + state * inner, weights
    if kind == "kda":
        heads, size = int(facts["heads"]), int(facts["state"])
        width = heads * size
        # q, k, v and output projections are hidden × width; so are the forget and the output gate, or through a rank.
        rank = int(facts.get("gate_rank", 0))
        gates = 2 * (hidden + width) * rank if rank else 2 * hidden * width
        weights = 4 * hidden * width + gates + 3 * width * conv + hidden * heads + heads + width
        return 3 * (conv - 1) * width + size * width, weights
    raise BadCatalogError(f"{kind!r} is not a recurrent kind", "known: gated_delta, mamba2, short_conv, kda")


def build_layers(raw: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The layers of one [[models]] table. Raises BadCatalogError, or KeyError naming a missing fact."""
    n_layers = int(raw["layers"])
    if "layer_list" in raw:
        return _listed(raw["layer_list"], n_layers)
    kinds = expand_pattern(raw.get("pattern", ["full"]), n_layers)
    experts = raw.get("experts")
    shared_from = n_layers - int(raw.get("shared_kv_layers", 0))
    dense_until = int(experts.get("dense_layers", 0)) if experts else n_layers
    made: dict[tuple[LayerKind, bool, bool], Layer] = {}
    layers = []
    for index, kind in enumerate(kinds):
        key = (kind, index >= shared_from, index < dense_until)
        if key not in made:
            made[key] = _layer(raw, *key)
        layers.append(made[key])
    return tuple(layers)


def _listed(rows: list[dict[str, Any]], n_layers: int) -> tuple[Layer, ...]:
    """Layers that are given one by one, as often as each says: what was read from a file's header."""
    layers = [
        layer for row in rows for layer in [Layer(**{k: v for k, v in row.items() if k != "times"})] * row["times"]
    ]
    if len(layers) != n_layers:
        raise BadCatalogError(f"{len(layers)} layers are listed, the model has {n_layers}")
    return tuple(layers)


def _layer(raw: Mapping[str, Any], kind: LayerKind, shares_kv: bool, dense: bool) -> Layer:
    ffn: FfnKind = "dense" if dense else "experts"
    if not dense and raw["experts"].get("beside_dense"):
        ffn = "both"
    if raw.get("split_blocks") and kind != "none":
        ffn = "none"
    width = int(raw.get("shared_kv_ffn", 0)) if shares_kv else 0
    if kind == "none":
        return Layer("none", ffn=ffn, intermediate=width)
    if kind == "recurrent":
        state, weights = recurrent_sizes(raw["recurrent"], int(raw["hidden"]))
        return Layer("recurrent", state_elements=state, mixer_params=weights, ffn=ffn, intermediate=width)
    if kind == "mla":
        mla = raw["mla"]
        return Layer(
            "mla",
            n_kv_heads=1,
            head_dim_k=int(mla["nope"]) + int(mla["rope"]),
            head_dim_v=int(mla["v"]),
            mla_rank=int(mla["rank"]),
            mla_rope_dim=int(mla["rope"]),
            ffn=ffn,
            intermediate=width,
            index_dim=int(mla.get("index_dim", 0)),
        )
    own = raw.get(kind, {})
    head_dim = int(own.get("head_dim", raw["head_dim"]))
    # Per-layer embeddings (Gemma 3n, 4): an input gate, a projection back, and this layer's share of the model's one.
    per_layer = 3 * int(raw["hidden"]) * int(raw.get("per_layer_embedding", 0))
    return Layer(
        kind,
        n_kv_heads=int(own.get("kv_heads", raw["kv_heads"])),
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        window=int(own["window"]) if kind == "sliding" else 0,
        shares_kv=shares_kv,
        n_heads=int(own.get("heads", 0)),
        ffn=ffn,
        intermediate=width,
        mixer_params=per_layer,
        v_is_k=bool(own.get("v_is_k", False)),
        index_dim=int(own.get("index_dim", 0)),
    )
