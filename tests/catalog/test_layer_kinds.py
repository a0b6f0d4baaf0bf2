"""A kind of layer is one class. A test kind is added, read from test headers and planned, without a
change to other code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from localllm.device.name_lookup import resolve
from localllm.planner import decode_cost, kv_sizes, memory
from localllm.planner.explain import explain
from localllm.planner.plan import plan_for
from localllm.planner.types import RunSettings, Workload
from localllm_catalog import catalog, gguf, shapes
from localllm_catalog.build import build_layers, layer_of, row_of
from localllm_catalog.errors import BadCatalogError
from localllm_catalog.from_gguf import model_from_gguf
from localllm_catalog.from_hf import model_from_config
from localllm_catalog.gguf_blocks import GgufLayer
from localllm_catalog.hf_config import Config
from localllm_catalog.layers import mixer
from localllm_catalog.layers.mixer import CacheLayout, Mixer, TableLayer, Widths

Write = Callable[..., Path]


@dataclass(frozen=True, slots=True)
class Pooled(Mixer):
    """A test kind: one row of `width` elements, both key and value, for every `ratio` tokens."""

    width: int
    ratio: int

    word: ClassVar[str] = "pooled"
    precedence: ClassVar[int] = 45
    config_words: ClassVar[tuple[str, ...]] = ("pooled_attention",)
    architectures: ClassVar[tuple[str, ...]] = ("madeup",)

    @property
    def attends(self) -> bool:
        return True

    def cells(self, layout: CacheLayout) -> int:
        return layout.n_ctx // self.ratio

    @property
    def row(self) -> tuple[int, int]:
        return self.width, 0

    def seen(self, depth: float, beside: float = 0.0) -> float:
        return depth // self.ratio

    def flops(self, n_heads: int, depth: float, beside: float = 0.0) -> float:
        return 4.0 * n_heads * self.width * self.seen(depth)

    def n_params(self, widths: Widths) -> int:
        return widths.hidden * self.width

    def describe(self, cells: int, n_sequences: int) -> str:
        return f"pooled by {self.ratio}, {cells:,} cells"

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        ratio = layer.facts.number("attention.pool_ratio", 0)
        return cls(layer.facts.head_dim_k, ratio) if ratio else None

    @classmethod
    def from_table(cls, layer: TableLayer) -> Mixer | None:
        if layer.word != cls.word:
            return None
        return cls(int(layer.own["width"]), int(layer.own["ratio"]))

    @classmethod
    def read_config(cls, words: list[str], config: Config, table: dict[str, Any]) -> list[str]:
        if cls.word in words:
            ratio = config.number("pool_ratio")
            table["pooled"] = {"width": table["head_dim"], "ratio": ratio}
        return words


@pytest.fixture(autouse=True)
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixer, "KINDS", list(mixer.KINDS))
    mixer.register(Pooled)


CONFIG = {
    "model_type": "madeup", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "head_dim": 64, "vocab_size": 1000, "intermediate_size": 1024, "pool_ratio": 8,
    "max_position_embeddings": 32768,
    "layer_types": ["pooled_attention", "full_attention"] * 2,
}  # fmt: skip


def test_a_layer_kind_is_read_from_a_gguf_header(write_gguf: Write) -> None:
    said = {
        "general.architecture": "madeup", "madeup.block_count": 4, "madeup.embedding_length": 256,
        "madeup.feed_forward_length": 1024, "madeup.attention.head_count": 4,
        "madeup.attention.pool_ratio": 8, "madeup.vocab_size": 1000,
    }  # fmt: skip
    model = model_from_gguf(gguf.read(write_gguf(said, [])))
    assert [layer.mixer for layer in model.layers] == [Pooled(64, 8)] * 4
    assert model.shape_warning == ""


def test_a_layer_kind_is_read_from_a_config_and_planned() -> None:
    model = model_from_config(CONFIG, {"model.safetensors": 1 << 20})
    assert [layer.kind for layer in model.layers] == ["pooled", "full"] * 2
    assert model.layers[0].mixer == Pooled(64, 8)
    full = 2 * 4 * (64 + 64)
    assert shapes.kv_bytes_per_token(model) == 2 * (2 * 64 + full)
    assert decode_cost.kv_read_bytes(model, 8192) == 2 * (2 * 64 * 8192 // 8 + full * 8192)
    settings = RunSettings(8192)
    assert kv_sizes.kv_bytes(model, settings) == 2 * (2 * 64 * 8192 // 8 + full * 8192)
    assert memory.compute_bytes(model, settings) > 0
    device = resolve("M4 Max 128GB")
    plan = plan_for(device, model, model.variants[0], Workload(context=8192))
    assert plan.fits == "yes"
    assert any("pooled by 8, 1,024 cells" in line for line in explain(plan, device))


def test_a_layer_kind_is_read_from_a_family_file() -> None:
    sizes = {"kv_heads": 4, "head_dim": 64, "hidden": 256, "pooled": {"width": 64, "ratio": 8}}
    layers = build_layers({"layers": 3, "pattern": ["pooled*2", "full"], **sizes})
    assert [layer.kind for layer in layers] == ["pooled", "pooled", "full"]
    row = row_of(layers[0])
    assert row == {"kind": "pooled", "width": 64, "ratio": 8}
    assert layer_of(row) == layers[0]


def test_every_layer_of_the_catalog_matches_its_row() -> None:
    layers = {layer for model in catalog.load().models for layer in model.layers}
    assert len({type(layer.mixer) for layer in layers}) >= 6
    for layer in layers:
        assert layer_of(row_of(layer)) == layer


def test_a_row_of_an_unknown_kind_is_refused_with_the_kinds_that_are_known() -> None:
    with pytest.raises(BadCatalogError) as caught:
        layer_of({"kind": "brandnew"})
    assert "'brandnew' is not a layer kind" in caught.value.message
    assert "full, sliding" in caught.value.hint
