"""Attention with a recurrent state in the same layer (Falcon-H1)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from localllm_catalog.layers import mixer
from localllm_catalog.layers.mixer import Mixer, Wrapper, register
from localllm_catalog.layers.recurrent import header_state

if TYPE_CHECKING:
    from localllm_catalog.gguf_blocks import GgufLayer


@register
@dataclass(frozen=True, slots=True)
class WithState(Wrapper):
    """Attention as in `of`. Each sequence keeps `state_elements` more float32 numbers."""

    state_elements: int = 0

    key: ClassVar[str] = "state_elements"
    precedence: ClassVar[int] = 50
    architectures: ClassVar[Collection[str]] = ("falcon-h1",)

    @property
    def state_floats(self) -> int:
        return self.state_elements

    @property
    def value(self) -> int:
        return self.state_elements

    @classmethod
    def wrapping(cls, of: Mixer, value: Any) -> Mixer:
        return cls(of, int(value))

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        if layer.facts.arch not in cls.architectures:
            return None
        return cls(mixer.from_gguf(layer, cls), header_state(layer.facts))
