"""EAGLE-3 on MLX: one layer that drafts from its own hidden row, with mlx-vlm's weights and layers.

The first hidden row is made from the features of three of the model's layers. The drafter's
vocabulary may be a part of the model's (`d2t` maps it back).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.rope_utils import initialize_rope
from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel
from mlx_vlm.speculative.drafters.eagle3 import ModelConfig as Eagle3Config

from localllm_backends.draft_head_state import LONGEST_DRAFT
from localllm_backends.drafter_config import DrafterConfig, eagle3_text
from localllm_backends.mlx.draft_heads import LockstepHeads
from localllm_backends.mlx.draft_target import Target, TrainedModule, check_ids, read_module
from localllm_backends.mlx.files import fingerprint
from localllm_backends.mlx.stepping import Stepper


class _Weights(Eagle3DraftModel):  # type: ignore[misc]
    """mlx-vlm's module. It also accepts the names of SafeAILab's and SGLang's heads, and heads
    without tables of their own, which use the model's."""

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
        named = {}
        for name, value in weights.items():
            named[name.removeprefix("model.").replace("midlayer.", "layers.0.")] = value
        if "embed_tokens.weight" not in named:
            self.embed_tokens = None
        if "lm_head.weight" not in named:
            self.lm_head = None
        sanitized: dict[str, Any] = super().sanitize(named)
        return sanitized


class Eagle3Module(TrainedModule):
    """See DraftModule."""

    kind: ClassVar[str] = "eagle3"
    longest = LONGEST_DRAFT

    def __init__(self, weights: Any, target: Target, layers: tuple[int, ...], mark: str) -> None:
        super().__init__(weights, target, layers, mark)
        if weights.embed_tokens is None:
            weights.embed_tokens = target.embeddings
        self._output = weights.lm_head
        if self._output is None:
            self._output = target.output

    def open(self, stepper: Stepper, identity: str, n_batch: int) -> LockstepHeads:
        return LockstepHeads(self, stepper, identity, n_batch=n_batch)

    def __call__(self, tokens: Any, rows: Any, caches: Sequence[Any]) -> Any:
        """Return the hidden rows after `tokens` [sequences, n].

        `rows` are the model's features before them, or the hidden rows of an earlier call.
        """
        weights = self._weights
        hidden = rows.astype(weights.norm.weight.dtype)
        if int(rows.shape[-1]) == self.width:
            if weights.input_norm is not None:
                hidden = weights.input_norm(hidden)
            hidden = weights.fc(hidden)
        embedded = weights.embed_tokens(tokens).astype(hidden.dtype)
        mask = create_attention_mask(hidden, caches[0])
        first, *further = weights.layers
        hidden = first(embedded, hidden, mask, caches[0], caches[0].offset)
        for layer, cache in zip(further, caches[1:], strict=True):
            hidden = layer(hidden, mask, cache, cache.offset)
        return hidden

    def logits(self, hidden: Any) -> Any:
        return self._output(self._weights.norm(hidden))

    def token_ids(self, best: Any) -> Any:
        """Return the model's ids of the tokens with these places in `logits`."""
        table = self._weights.d2t
        if table is None:
            return best
        return best + table[best]


def eagle3_module(
    folder: Path, raw: dict[str, Any], drafter: DrafterConfig, target: Target
) -> Eagle3Module:
    """Return the EAGLE-3 head in `folder`."""
    text = dict(eagle3_text(raw))

    def make(config: dict[str, Any]) -> Any:
        settings = {
            **config,
            "transformer_layer_config": text,
            "target_hidden_size": target.width,
            "draft_vocab_size": config.get("draft_vocab_size") or drafter.vocabulary,
        }
        return _Weights(Eagle3Config.from_dict(settings))

    weights = read_module(folder, make)
    if weights.d2t is not None:
        places = mx.arange(weights.d2t.size)
        check_ids("its table d2t", (places + weights.d2t).tolist(), target.vocabulary)
    for layer in weights.layers:
        # mlx-vlm leaves out the scaling for long contexts.
        attention = layer.self_attn
        attention.rope = initialize_rope(
            attention.head_dim,
            base=layer.self_attn.config.rope_theta,
            traditional=False,
            scaling_config=text.get("rope_scaling") or text.get("rope_parameters"),
            max_position_embeddings=text.get("max_position_embeddings"),
        )
    layers = drafter.layers
    if not layers:
        # The usual choice if a head names no layers: inputs of an early, a middle and a late layer.
        n = len(target.layers)
        layers = (1, n // 2 - 1, n - 4)
    if len(layers) != 3 or min(layers) < 0:
        raise ValueError(f"it reads {len(layers)} layers of a model with {len(target.layers)}")
    return Eagle3Module(weights, target, layers, fingerprint(folder)[:12])
