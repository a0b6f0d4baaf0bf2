"""Attention in parts for mlx-lm's models: where it is inserted, and whether a model uses it.

mlx-lm's layers fetch keys and values from their cache and pass them to a function of mlx-lm. In the
modules of the loaded model, `attention` takes that function's place. If the keys come from shared
segments, it computes in parts. Otherwise it calls mlx-lm's function.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from localllm_backends.mlx.attention import Attention
from localllm_backends.mlx.layout import Layout
from localllm_backends.mlx.sequence_cache import SequenceCache
from localllm_backends.mlx.shared_prefix import OwnKeys, attend

_FUNCTION = "scaled_dot_product_attention"
_theirs = getattr(base, _FUNCTION, None)
# For longer chunks one copy of the prefix costs little compared with the rest of the step, and the
# fused kernel needs less memory for scores.
_LONGEST_CHUNK = 16


def attention(
    queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **further: Any
) -> Any:
    """Return the attention of `queries` [rows, heads, n, width], as mlx-lm's function does."""
    plain = all(option is None for option in further.values())
    if isinstance(cache, Attention) and plain and int(queries.shape[2]) <= _LONGEST_CHUNK:
        own = cache.take_own(keys, values, mask, int(queries.shape[2]))
        if own is not None:
            return attend(cache.groups, cache.number, cache.form, OwnKeys(*own), queries * scale)
    return _theirs(queries, keys, values, cache=cache, scale=scale, mask=mask, **further)  # type: ignore[misc]


def can_split(model: Any, layout: Layout) -> bool:
    """Make the layers of `model` use `attention`, and return whether all of them do.

    It builds the graph of a step over a shared prefix. Nothing is computed.
    """
    if _theirs is None:
        return False
    for layer in model.modules():
        module = sys.modules[type(layer).__module__]
        if getattr(module, _FUNCTION, None) is _theirs:
            setattr(module, _FUNCTION, attention)
    seq = SequenceCache(0, layout)
    other = SequenceCache(1, layout)
    ids = mx.zeros((1, 2), dtype=mx.int32)
    for n in (2, 1):
        seq.batch.make_room(n)
        model(ids[:, :n], cache=seq.batch.caches)
        seq.batch.advance([n])
        if n == 2:
            seq.length = n
            seq.move_to_segment(n)
            other.batch.use_chain(seq.chain)
    in_parts = [leaf.was_split for leaf in seq.batch.own_leaves]
    return bool(in_parts) and all(in_parts)
