"""The model that a drafter reads on MLX (`Target`), and how modules of heads get their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model


class Target:
    """The model that a drafter was trained for."""

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        language_model = getattr(model, "language_model", model)
        trunk = getattr(language_model, "model", None)
        self.family = str(config.get("model_type", ""))
        text = config.get("text_config", config)
        self.width = int(text["hidden_size"])
        self.vocabulary = int(text["vocab_size"])
        self.layers = getattr(trunk, "layers", [])
        self.embeddings = getattr(trunk, "embed_tokens", None)
        # The output matrix is the table of embeddings, unless there is a separate one.
        self.output = getattr(self.embeddings, "as_linear", None)
        if "lm_head" in language_model:
            self.output = language_model.lm_head
        # mlx-lm's Gemma models multiply embeddings outside of their table.
        self.embed_scale = 1.0
        if self.family.startswith("gemma"):
            self.embed_scale = self.width**0.5
        self._held = {id(array) for _, array in tree_flatten(model.parameters())}

    def without_own(self, arrays: list[Any]) -> list[Any]:
        """Return those of `arrays` that do not belong to this model."""
        return [array for array in arrays if id(array) not in self._held]

    def tap(self, layers: tuple[int, ...], callback: Callable[[list[Any]], None]) -> None:
        """After every call, pass the outputs of `layers` [sequences, n, width]."""
        outputs: dict[int, Any] = {}

        def keep(layer: int, output: Any) -> None:
            outputs[layer] = output
            if layer == max(layers):
                callback([outputs[i] for i in layers])
                outputs.clear()

        for layer in set(layers):
            _tap_layer(self.layers[layer], layer, keep)


class TrainedModule:
    """The memory and weights of a drafter that reads the outputs of `layers`. See DraftModule."""

    first: ClassVar[int] = 1
    free_rewind: ClassVar[bool] = True

    def __init__(self, weights: Any, target: Target, layers: tuple[int, ...], mark: str) -> None:
        self._weights = weights
        self._target = target
        self._layers = layers
        self.mark = mark
        self.width = target.width * len(layers)

    @property
    def caches(self) -> list[Any]:
        return [KVCache() for _ in self._weights.layers]

    @property
    def arrays(self) -> list[Any]:
        return self._target.without_own([a for _, a in tree_flatten(self._weights.parameters())])

    def tap(self, callback: Callable[[list[Any]], None]) -> None:
        self._target.tap(self._layers, callback)


def _tap_layer(layer: Any, number: int, keep: Callable[[int, Any], None]) -> None:
    """Pass every output of `layer` to `keep`. Its class changes; its weights and names do not."""
    plain = type(layer)

    def tapped(self: Any, *inputs: Any, **named: Any) -> Any:
        output = plain.__call__(self, *inputs, **named)
        # Some layers also return the keys and values that later layers share.
        keep(number, output[0] if isinstance(output, tuple) else output)
        return output

    named = {"__call__": tapped, "__module__": plain.__module__}
    layer.__class__ = type(plain.__name__, (plain,), named)


def read_module(folder: Path, make: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the module that `make` builds from the folder's config, with its weights, not read
    yet.

    Raises ValueError for weights that can't be multiplied.
    """

    class Arguments:
        from_dict: Any = staticmethod(dict)

    def classes(config: Any) -> tuple[Any, Any]:
        return make, Arguments

    module, _ = load_model(folder, lazy=True, get_model_classes=classes)
    _check_types(dict(tree_flatten(module.parameters())))
    return module


def check_ids(what: str, ids: Sequence[object], vocabulary: int) -> None:
    """Raise ValueError if one of `ids` is no token. MLX reads tables without checking places."""
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < vocabulary:
            raise ValueError(f"{what} names the token {token_id!r}, outside of its vocabulary")


def _check_types(weights: Mapping[str, Any]) -> None:
    """Raise ValueError if a weight has whole numbers, unless they are those of a quant."""
    for name, array in weights.items():
        place = name.rpartition(".")[0]
        quantised = f"{place}.scales" in weights
        if place and not quantised and not mx.issubdtype(array.dtype, mx.floating):
            raise ValueError(f"{name} has elements of the type {array.dtype}")
