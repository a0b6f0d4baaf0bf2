"""The KV types of MLX: which a model can use, and their storage formats."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from localllm_backends.contract import KvType, LoadError
from localllm_backends.mlx.kv_format import KvFormat
from localllm_backends.mlx.layout import Layout
from localllm_backends.mlx.shapes import Shapes

# Bits of an element in groups with a scale and a bias (mx.quantize), and with TurboQuant.
GROUP_BITS = {"q8_0": 8, "q6_0": 6, "q5_0": 5, "q4_0": 4, "q3_0": 3, "q2_0": 2}
TURBO_BITS = {"turbo4": 4, "turbo3": 3, "turbo2": 2}
_GROUP_SIZES = (64, 32)
# The contract's names for the types in which a model can compute keys and values.
_OWN_TYPES: dict[str, KvType] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def own_shapes(model: Any, caches: Sequence[Any], slack: int) -> Shapes:
    """Return the shapes of the model's memory in the type in which it computes.

    Raises LoadError if the contract has no name for that type.
    """
    shapes = Shapes.of(model, Layout(caches, KvFormat(), slack))
    if not shapes.kv:
        return shapes
    name = str(shapes.kv[0].dtype).removeprefix("mlx.core.")
    if name not in _OWN_TYPES:
        raise LoadError(
            f"this model keeps its KV cache as {name}, which the MLX backend does not support "
            f"(it supports {', '.join(_OWN_TYPES)})"
        )
    return replace(shapes, kv_type=_OWN_TYPES[name])


def shapes_with(model: Any, caches: Sequence[Any], own: Shapes, kind: KvType) -> Shapes:
    """Return the shapes of a KV cache of type `kind`. `own`: those of the model's own type.

    Raises LoadError if the model can't use the type.
    """
    # In the contract, "f16" means "not quantised". MLX then keeps the type in which the model
    # computes, and `info` gives it.
    if kind in ("f16", own.kv_type):
        return own
    if kind in TURBO_BITS and importlib.util.find_spec("mlx_vlm") is None:
        raise LoadError(
            f"the KV type {kind} needs mlx-vlm, which is not installed",
            "pip install 'localllm[vision]'",
        )
    if kind not in GROUP_BITS and kind not in TURBO_BITS:
        raise LoadError(
            f"MLX stores this model's KV cache as {own.kv_type} (selected by f16 or "
            f"{own.kv_type}); {kind} is not possible"
        )
    form = _format(own, kind)
    if form is not None:
        # Some attention code reads keys and values as arrays, and fails while the graph is built,
        # before any work.
        with suppress(Exception):
            layout = Layout(caches, form, own.layout.slack)
            return replace(Shapes.of(model, layout), kv_type=kind)
    raise LoadError(
        f"this model's KV cache can't be stored as {kind} in MLX, which can't quantise sliding "
        "windows, latent attention and head sizes that 32 does not divide; it is stored as "
        f"{own.kv_type}"
    )


def _format(own: Shapes, kind: KvType) -> KvFormat | None:
    """Return the storage format of `kind`; None if the widths of the model don't allow it."""
    if not own.kv or own.layout.windows:
        return None
    # Every head's width must be a multiple of the quantisation group.
    common_width = math.gcd(*own.widths)
    if kind in TURBO_BITS:
        from localllm_backends.mlx.turbo_format import TurboFormat

        return TurboFormat(TURBO_BITS[kind]) if common_width % 32 == 0 else None
    group = next((size for size in _GROUP_SIZES if common_width % size == 0), None)
    if group is None:
        return None
    return KvFormat(GROUP_BITS[kind], group)
