"""LoRA adapters on MLX: mlx-lm's own LoRA layers over one copy of the weights, exchanged between
steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_adapters

from localllm_backends.contract import LoadError, LoraAdapter
from localllm_backends.plain_files import check_plain_files

# The attribute of a LoRA layer that holds the layer it changes.
_INNER = ("linear", "embedding")


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """A LoRA layer of mlx-lm, the name of the attribute with its inner layer, and its own scale."""

    layer: Any
    inner: str
    scale: float


class AdapterLayers:
    """The adapters of `model`. None is applied before the first `use`.

    `explain` makes one sentence of an exception. Raises LoadError if an adapter belongs to another
    model.
    """

    def __init__(
        self, model: Any, adapters: Sequence[LoraAdapter], explain: Callable[[Exception], str]
    ) -> None:
        self.model = model
        self._loaded_scales = tuple(adapter.scale for adapter in adapters)
        self.scales = (0.0,) * len(adapters)
        # For each adapter, its layers by their place in the model.
        self._adapters: list[dict[str, LoraLayer]] = []
        # The layers of the model itself by their place, and the modules that hold them.
        self._own: dict[str, Any] = {}
        self._holders: dict[str, Any] = {}
        for adapter in adapters:
            check_plain_files(Path(adapter.path))
            try:
                load_adapters(model, adapter.path)
            except Exception as e:
                # The mismatch comes after a line with the folder's name.
                why = ValueError(str(e).rpartition("tensors:\n")[2])
                name = Path(adapter.path).name
                raise LoadError(
                    f"{name!r} is not a LoRA adapter for this model: {explain(why)}"
                ) from e
            self._adapters.append(self._detach_lora(model))
        model.eval()

    def _detach_lora(self, model: Any) -> dict[str, LoraLayer]:
        """Put the model's own layers back in place of its LoRA layers, and return those."""
        found: dict[str, LoraLayer] = {}
        for place, layer in model.named_modules():
            if "lora_a" in layer:
                inner = next(name for name in _INNER if name in layer)
                layer.eval()
                found[place] = LoraLayer(layer, inner, layer.scale)
        for place, lora in found.items():
            holder = model
            *path, name = place.split(".")
            for part in path:
                holder = holder[int(part)] if isinstance(holder, list) else holder[part]
            self._holders[place] = holder
            self._own[place] = holder[name] = lora.layer[lora.inner]
        return found

    def close(self) -> None:
        """Let the memory of the model and of all layers be freed."""
        self.model = None
        self._adapters = []
        self._own = {}
        self._holders = {}

    @property
    def arrays(self) -> list[Any]:
        """The weights of all adapters."""
        found: list[Any] = []
        for adapter in self._adapters:
            for lora in adapter.values():
                found += [lora.layer["lora_a"], lora.layer["lora_b"]]
        return found

    def use_loaded(self) -> None:
        """Apply the adapters with the scales with which they were loaded."""
        self.use(self._loaded_scales)

    @contextmanager
    def used(self, scales: Sequence[float]) -> Iterator[None]:
        """Apply the adapters with these scales for a moment."""
        before = self.scales
        if scales != before:
            self.use(scales)
        try:
            yield
        finally:
            if scales != before:
                self.use(before)

    def use(self, scales: Sequence[float]) -> None:
        """Apply each adapter with its scale; one of scale 0 is left out."""
        self.scales = tuple(scales)
        for place, own in self._own.items():
            layer = own
            for adapter, scale in zip(self._adapters, scales, strict=True):
                lora = adapter.get(place)
                if lora is None or not scale:
                    continue
                lora.layer.scale = lora.scale * scale
                lora.layer[lora.inner] = layer
                layer = lora.layer
            self._holders[place][place.rpartition(".")[2]] = layer
