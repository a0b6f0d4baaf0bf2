"""A model's own draft heads (MTP) on MLX: the layer after the model's last one, which mlx-lm does
not load.

From a token and the model's hidden state at the position before it, a head predicts the token after
it. The hidden state is the output of the model's last norm, which is also the input of its output
matrix. The head continues from its own such output (github.com/ggml-org/llama.cpp/pull/24025,
github.com/vllm-project/vllm/pull/47448; vLLM's qwen3_next_mtp and mimo_mtp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from localllm_backends.contract import LoadError
from localllm_backends.draft_head_state import LONGEST_DRAFT
from localllm_backends.mlx.draft_heads import LockstepHeads
from localllm_backends.mlx.draft_target import read_module
from localllm_backends.mlx.files import weight_files
from localllm_backends.mlx.stepping import Stepper

# Names of a head's weights in checkpoints, and our names. With ours, mlx-lm's own rules for a layer
# and for norms apply.
_QWEN = {
    "mtp.layers.0.": "model.layers.0.",
    "mtp.pre_fc_norm_embedding.": "embed_norm.input_layernorm.",
    "mtp.pre_fc_norm_hidden.": "hidden_norm.input_layernorm.",
    "mtp.norm.": "model.norm.",
    "mtp.fc.": "join.",
}
_MIMO = {
    "model.mtp_layers.0.token_layernorm.": "embed_norm.input_layernorm.",
    "model.mtp_layers.0.hidden_layernorm.": "hidden_norm.input_layernorm.",
    "model.mtp_layers.0.final_layernorm.": "model.norm.",
    "model.mtp_layers.0.input_proj.": "join.",
    "model.mtp_layers.0.": "model.layers.0.",
}
_FAMILIES = {"qwen3_next": _QWEN, "qwen3_5": _QWEN, "qwen3_5_moe": _QWEN, "mimo": _MIMO}
# Families whose joining matrix takes the hidden state before the embedding.
_HIDDEN_FIRST = {"mimo"}
# Settings for a model with one layer of the same kind as the head's.
_ONE_LAYER = {
    "num_hidden_layers": 1,
    "full_attention_interval": 1,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


class MtpModule(nn.Module):  # type: ignore[misc]
    """A head's weights, loaded with mlx-lm's code.

    A model of the same kind with a single layer defines how they are stored. See DraftModule.
    """

    kind: ClassVar[str] = "mtp"
    first: ClassVar[int] = 0
    free_rewind: ClassVar[bool] = False
    mark = "mtp"
    longest = LONGEST_DRAFT

    def __init__(self, config: dict[str, Any], model: Any) -> None:
        super().__init__()
        text = {**config.get("text_config", config), **_ONE_LAYER}
        one_layer = text
        if "text_config" in config:
            one_layer = {**config, "text_config": text}
        kin = type(model)(type(model.args).from_dict(one_layer))
        language_model = getattr(model, "language_model", model)

        def of_head() -> Any:
            return language_model

        # Not a member, because its weights are not part of the head's.
        self._language_model = of_head
        self._family = str(config["model_type"])
        self._sanitize = getattr(kin, "sanitize", dict)
        width = int(text["hidden_size"])
        eps = text["rms_norm_eps"]
        self.width = width
        self.model = {"layers": kin.model.layers[:1], "norm": kin.model.norm}
        self.embed_norm = {"input_layernorm": nn.RMSNorm(width, eps)}
        self.hidden_norm = {"input_layernorm": nn.RMSNorm(width, eps)}
        self.join = nn.Linear(2 * width, width, bias=False)

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Select the head's weights from a checkpoint, converted by mlx-lm's rules for such a
        layer."""
        # mlx-lm's rule for norms depends on how convolutions are stored.
        conv_weights = {name: value for name, value in weights.items() if "conv1d" in name}
        for name, value in weights.items():
            for theirs, ours in _FAMILIES[self._family].items():
                if theirs in name:
                    conv_weights[ours + name.partition(theirs)[2]] = value
                    break
        renamed = {}
        for name, value in self._sanitize(conv_weights).items():
            if "conv1d" not in name:
                renamed[name.removeprefix("language_model.")] = value
        return renamed

    def tap(self, callback: Callable[[list[Any]], None]) -> None:
        """Pass the model's hidden rows of every call to `callback`."""
        trunk = self._language_model().model
        norm = trunk.norm

        def tapped(x: Any) -> Any:
            normed = norm(x)
            callback([normed])
            return normed

        trunk.norm = tapped

    @property
    def caches(self) -> list[Any]:
        return [KVCache()]

    @property
    def arrays(self) -> list[Any]:
        return [array for _, array in tree_flatten(self.parameters())]

    def open(self, stepper: Stepper, identity: str, n_batch: int) -> LockstepHeads:
        return LockstepHeads(self, stepper, identity, n_batch=n_batch)

    def __call__(self, tokens: Any, rows: Any, caches: Sequence[Any]) -> Any:
        """Return the hidden rows after `tokens` [sequences, n], given the model's hidden rows
        before them."""
        [cache] = caches
        embedded = self._language_model().model.embed_tokens(tokens)
        parts = [
            self.embed_norm["input_layernorm"](embedded),
            self.hidden_norm["input_layernorm"](rows.astype(embedded.dtype)),
        ]
        if self._family in _HIDDEN_FIRST:
            parts.reverse()
        x = self.join(mx.concatenate(parts, axis=-1))
        [layer] = self.model["layers"]
        out = layer(x, create_attention_mask(x, cache), cache)
        return self.model["norm"](out)

    def token_ids(self, best: Any) -> Any:
        """Return the model's ids of the tokens with these places in `logits`."""
        return best

    def logits(self, hidden: Any) -> Any:
        """Return logits computed with the model's own output matrix."""
        model = self._language_model()
        if "lm_head" in model:
            return model.lm_head(hidden)
        return model.model.embed_tokens.as_linear(hidden)


def read_heads(folder: Path, model: Any, config: dict[str, Any]) -> MtpModule:
    """Return the draft head in the checkpoint of `model`, without reading its weights.

    Raises LoadError if there is no head that runs here.
    """
    kind = str(config.get("model_type", ""))
    if kind not in _FAMILIES:
        families = ", ".join(_FAMILIES)
        raise LoadError(
            f"draft heads of {kind!r} models are not supported on MLX; supported: {families}"
        )
    first = next(theirs for theirs, ours in _FAMILIES[kind].items() if ours == "model.layers.0.")
    stored: list[str] = []
    for file in weight_files(folder):
        weights: Any = mx.load(str(file))
        stored += weights
    if not any(first in name for name in stored):
        raise LoadError(
            f"{folder.name!r} contains no draft heads: mlx-lm omits them when "
            "it converts a checkpoint",
            f"use a checkpoint with draft heads (weights named {first}*), such as the "
            "original one, or --draft auto",
        )
    if any(first.replace("0", "1") in name for name in stored):
        raise LoadError(
            f"{folder.name!r} has several draft heads, but the MLX backend supports only one"
        )

    def make_head(own_config: dict[str, Any]) -> MtpModule:
        return MtpModule(own_config, model)

    try:
        head: MtpModule = read_module(folder, make_head)
    except Exception as e:
        raise LoadError(
            f"the draft head in {folder.name!r} can't be read: {str(e).strip()[:300]}"
        ) from e
    return head
