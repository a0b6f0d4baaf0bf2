"""Bytes and parameters from shapes agree with published and measured figures and with each
other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm_catalog import catalog, quants, shapes
from localllm_catalog.errors import CatalogError
from localllm_catalog.layers.latent import Latent
from localllm_catalog.layers.shared import Shared
from localllm_catalog.types import Layer, Model

MIB = 1 << 20
CATALOG = catalog.load()


def known(model_id: str) -> Model:
    model = CATALOG.get(model_id)
    assert model is not None
    return model


def shaped(*layers: Layer) -> Model:
    return replace(known("qwen3-8b"), layers=layers, variants=())


@pytest.mark.parametrize(
    ("model_id", "expected"),
    [
        ("qwen3-8b", 147_456),
        ("llama-3.3-70b-instruct", 327_680),
        ("llama-3.1-8b-instruct", 131_072),
        ("glm-4.7-flash", 54_144),
        ("qwen3-next-80b-a3b-instruct", 24_576),
    ],
)
def test_kv_bytes_per_token_at_f16(model_id: str, expected: int) -> None:
    assert shapes.kv_bytes_per_token(known(model_id)) == expected


def test_a_deepseek_v3_shaped_mla_model_caches_one_latent_row_per_layer() -> None:
    layer = Layer(Latent(mla_rank=512, mla_rope_dim=64, head_dim_k=192, head_dim_v=128))
    assert shapes.kv_bytes_per_token(shaped(*[layer] * 61)) == 70_272


def test_the_fixed_state_of_a_hybrid_is_separate_from_its_growing_cache() -> None:
    model = known("qwen3.6-27b")
    # from llama.cpp's log
    assert shapes.recurrent_state_bytes(model) / MIB == pytest.approx(149.62, abs=0.01)
    assert shapes.kv_bytes_per_token(model) == 65_536
    assert shapes.recurrent_state_bytes(known("qwen3-8b")) == 0


def test_layers_that_share_kv_add_none() -> None:
    model = known("gemma-4-e2b-it")
    assert sum(isinstance(layer.mixer, Shared) for layer in model.layers) == 20
    assert shapes.kv_bytes_per_token(model) == 6_144 + 12_288


@pytest.mark.parametrize("model", CATALOG.models, ids=lambda model: model.id)
def test_parameters_counted_from_shapes_match_the_stated_counts(model: Model) -> None:
    total, active = shapes.count_params(model)
    assert total == pytest.approx(model.params_total, rel=0.006)
    if model.params_active != model.params_total:
        near = active == pytest.approx(model.params_active, rel=0.03)
        assert near or f"{active / 1e9:.2f} B active" in model.params_note


def published() -> list[tuple[Model, str, int]]:
    return [
        (model, variant.quant, variant.file_bytes)
        for model in CATALOG.models
        for variant in model.variants
        if variant.format == "gguf"
        and variant.exact
        and variant.quant in quants.MIXTURES
        # This publisher's Qwen3-0.6B and 1.7B store the shared embedding twice.
        and not (
            variant.repo.startswith("bartowski/Qwen_Qwen3-")
            and model.id in ("qwen3-0.6b", "qwen3-1.7b")
        )
        # Qwen's own files of this model do too.
        and not variant.repo.startswith("Qwen/Qwen2.5-Coder-0.5B-")
        # These files contain a draft head, which an estimate does not include.
        and not variant.repo.startswith("ornith-ai/Ornith-1.5-")
        # These files have all weights except the experts at Q8_0, for any name.
        and not variant.repo.startswith("ggml-org/MiMo-V2.6-Flash-")
        # These are not llama.cpp's own mixtures: attention and shared experts have more bits.
        and not variant.repo.startswith("AngelSlim/Hy3-")
        # Models trained for four bits are Q4_0 throughout, for any name.
        and "-qat-" not in variant.repo
    ]


def test_estimated_file_sizes_match_published_ones() -> None:
    errors = [
        abs(shapes.estimate_gguf_bytes(model, quant) / size - 1)
        for model, quant, size in published()
    ]
    assert len(errors) >= 55
    assert max(errors) < 0.055
    assert sorted(errors)[len(errors) // 2] < 0.003


def test_an_unknown_kv_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CatalogError) as caught:
        shapes.kv_bytes_per_token(known("qwen3-8b"), "q1_0")
    assert "q8_0" in caught.value.hint
