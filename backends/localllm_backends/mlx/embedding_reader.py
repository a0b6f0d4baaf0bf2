"""Lets mlx-lm's language model read image embeddings in place of tokens.

For some model families, image tokens have positions in three dimensions (M-RoPE), and images add
values after the first layers (deepstack). mlx-lm's models only support tokens with one-dimensional
positions. So their rotary embeddings and first layers are wrapped. While an image is read, the
wrappers compute the same as mlx-vlm; for text they change no result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from localllm_backends.contract import LoadError


class EmbeddingReader:
    """Calls a language model on tokens or image embeddings.

    `shifts`: for each row of a step's caches, the difference between position and token count.
    """

    def __init__(self, model: Any, ahead: str, shifts: Callable[[Any], Sequence[int]]) -> None:
        self._model = model
        self._ahead = ahead
        self._shifts = shifts
        self._text = model.language_model.model
        probe = self._text.embed_tokens(mx.zeros((1, 1), dtype=mx.int32))
        self._dtype = probe.dtype
        self._width = int(probe.shape[-1])
        self._rows: Any = None
        self._places: Any = None
        # Read by the wrappers during a call. For an image: `places`, the positions of its tokens,
        # and `added`, what it adds after each layer. For text: `shift` of the positions.
        self.places: Any = None
        self.shift: Any = None
        self.added: list[Any] = []

    def wrap(self, config: Mapping[str, Any], style: str) -> None:
        """Wrap the model for positions in three dimensions, and for what images add (deepstack)."""
        from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding

        text = config.get("text_config", config)
        rope_config = text.get("rope_parameters") or text.get("rope_scaling") or {}
        # Number of a head's frequencies for time, height and width.
        section = list(rope_config.get("mrope_section", ()))
        layers = self._text.layers
        for layer in layers:
            if not hasattr(layer, "self_attn"):
                continue  # a recurrent layer has no positions
            rope = layer.self_attn.rope
            if type(rope) is not nn.RoPE:
                raise LoadError(
                    f"images are not supported with positions of a {type(rope).__name__}"
                )
            in_rows = MRoPERotaryEmbedding(
                rope.dims, base=rope.base, mrope_section=section, style=style
            )
            layer.self_attn.rope = _placed(rope, in_rows, self)
        n_added = len(config["vision_config"].get("deepstack_visual_indexes") or ())
        for i in range(n_added):
            layers[i] = _added_to(layers[i], i, self)

    def set_embeddings(self, rows: Any, places: Any) -> None:
        """Set the embeddings of the next tokens: `rows` [tokens, width] at `places` [3, tokens].

        `places` None: one-dimensional positions.
        """
        self._rows = mx.array(rows)[None].astype(self._dtype)
        self._places = None if places is None else mx.array(places)[:, None]

    def clear(self) -> None:
        self._rows = None
        self.places = None
        self.added = []

    def __call__(self, ids: Any, cache: Any) -> Any:
        if self._rows is None:
            shifts = self._shifts(cache)
            if not any(shifts):
                self.shift = None
            elif len(shifts) == 1:
                self.shift = shifts[0]
            else:
                self.shift = mx.array(list(shifts))
            return self._model(ids, cache=cache)
        n = int(ids.shape[1])
        now = self._rows[:, :n]
        later = self._rows[:, n:]
        now, *self.added = mx.split(now, now.shape[-1] // self._width, axis=-1)
        if self._places is not None:
            self.places = self._places[..., :n]
            self._places = self._places[..., n:]
        seeing = [leaf.rows for leaf in cache] if self._ahead else []
        for rows in seeing:
            rows.attends_ahead = self._ahead == "everywhere" or rows.window is not None
        logits = self._model(ids, cache=cache, input_embeddings=now)
        for rows in seeing:
            rows.attends_ahead = False
        self.clear()
        self._rows = later if later.shape[1] else None
        return logits


def _placed(rope: Any, in_rows: Any, reader: EmbeddingReader) -> Callable[..., Any]:
    """Wrap a layer's rotary embedding `rope`; `in_rows` is used for images."""

    def rotated(x: Any, offset: Any = 0) -> Any:
        if reader.places is not None:
            return in_rows.apply_rotary(x, x, reader.places)[0]
        if reader.shift is not None:
            offset = offset + reader.shift
        return rope(x, offset=offset)

    return rotated


def _added_to(layer: Any, i: int, reader: EmbeddingReader) -> Callable[..., Any]:
    """Wrap layer number `i`, so that an image can add values to its output."""

    def added_to(*given: Any, **named: Any) -> Any:
        out = layer(*given, **named)
        if reader.added:
            return out + reader.added[i]
        return out

    return added_to
