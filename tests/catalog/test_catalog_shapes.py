"""Bytes and parameters from shapes: the published and measured figures they have to meet, and laws between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm_catalog import catalog, quants, shapes
from localllm_catalog.errors import CatalogError
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
    layer = Layer("mla", n_kv_heads=1, head_dim_k=192, head_dim_v=128, mla_rank=512, mla_rope_dim=64)
    assert shapes.kv_bytes_per_token(shaped(*[layer] * 61)) == 70_272


# Measured with llama.cpp's own allocator (no_alloc, llama-cpp-python 0.3.36), in MiB, all layers full-length.
@pytest.mark.parametrize(
    ("model_id", "tokens", "kv_type", "mib"),
    [
        ("llama-3.1-8b-instruct", 32_768, "f16", 4096),
        ("llama-3.1-8b-instruct", 32_768, "q8_0", 2176),
        ("llama-3.1-8b-instruct", 32_768, "q5_1", 1536),
        ("llama-3.1-8b-instruct", 32_768, "q5_0", 1408),
        ("llama-3.1-8b-instruct", 32_768, "q4_1", 1280),
        ("llama-3.1-8b-instruct", 32_768, "q4_0", 1152),
        ("llama-3.1-8b-instruct", 32_768, "iq4_nl", 1152),
        ("llama-3.3-70b-instruct", 32_768, "f16", 10_240),
        ("qwen3-32b", 32_768, "f16", 8192),
        ("qwen3-30b-a3b", 32_768, "f16", 3072),
        ("qwen3.6-27b", 32_768, "f16", 2048),
        ("qwen3.6-27b", 262_144, "f16", 16_384),
    ],
)
def test_kv_bytes_are_those_llama_cpp_allocates(model_id: str, tokens: int, kv_type: str, mib: int) -> None:
    assert shapes.kv_bytes(known(model_id), tokens, kv_type) == mib * MIB


def test_deepseek_v2_lite_as_measured() -> None:
    layer = Layer("mla", n_kv_heads=1, head_dim_k=192, head_dim_v=128, mla_rank=512, mla_rope_dim=64)
    lite = shaped(*[layer] * 27)
    assert shapes.kv_bytes(lite, 4096) / MIB == 121.5
    assert shapes.kv_bytes(lite, 32_768) / MIB == 972
    assert shapes.kv_bytes(lite, 32_768, "q8_0") / MIB == pytest.approx(516.38, abs=0.01)


@pytest.mark.parametrize(
    ("model_id", "per_token", "long_per_token", "at_131072"),
    [
        # 18 of 36 layers remember 128 tokens: 36,864 × 131,072 + 36,864 × 128.
        ("gpt-oss-120b", 73_728, 36_864, 4_836_556_800),
        # 52 of 62 layers remember 1,024: 81,920 × 131,072 + 425,984 × 1,024.
        ("gemma-3-27b-it", 507_904, 81_920, 11_173_625_856),
        ("gemma-3-4b-it", 139_264, 20_480, 20_480 * 131_072 + 118_784 * 1_024),
    ],
)
def test_sliding_windows_are_counted_at_131072_tokens(
    model_id: str, per_token: int, long_per_token: int, at_131072: int
) -> None:
    model = known(model_id)
    assert shapes.kv_bytes_per_token(model) == per_token
    assert shapes.kv_bytes_per_token(model, beyond_windows=True) == long_per_token
    assert shapes.kv_bytes(model, 131_072) == at_131072


def test_a_hybrids_fixed_state_is_apart_from_its_growing_cache() -> None:
    model = known("qwen3.6-27b")
    assert shapes.recurrent_state_bytes(model) / MIB == pytest.approx(149.62, abs=0.01)  # llama.cpp's log
    assert shapes.kv_bytes(model, 0) == 0
    assert shapes.kv_bytes_per_token(model) == 65_536
    assert shapes.recurrent_state_bytes(known("qwen3-8b")) == 0


def test_layers_that_share_kv_add_none() -> None:
    model = known("gemma-4-e2b-it")
    assert sum(layer.shares_kv for layer in model.layers) == 20
    assert shapes.kv_bytes_per_token(model) == 6_144 + 12_288


@pytest.mark.parametrize("model", CATALOG.models, ids=lambda model: model.id)
def test_parameters_counted_from_shapes_agree_with_the_stated(model: Model) -> None:
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
        # Qwen3-0.6B and 1.7B of this publisher hold the shared embedding twice.
        and not (variant.repo.startswith("bartowski/Qwen_Qwen3-") and model.id in ("qwen3-0.6b", "qwen3-1.7b"))
    ]


def test_estimates_land_on_published_file_sizes() -> None:
    errors = [abs(shapes.estimate_gguf_bytes(model, quant) / size - 1) for model, quant, size in published()]
    assert len(errors) >= 55
    assert max(errors) < 0.055
    assert sorted(errors)[len(errors) // 2] < 0.003


kinds = st.sampled_from(["full", "sliding", "mla", "recurrent", "none"])


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    kind = draw(kinds)
    width = st.integers(1, 16).map(lambda n: 32 * n)
    return Layer(
        kind,
        n_kv_heads=draw(st.integers(1, 16)),
        head_dim_k=draw(width),
        head_dim_v=draw(width),
        window=draw(st.integers(1, 5000)) if kind == "sliding" else 0,
        mla_rank=draw(width),
        mla_rope_dim=64,
        state_elements=draw(st.integers(0, 1 << 20)) if kind == "recurrent" else 0,
        shares_kv=draw(st.booleans()),
    )


@given(st.lists(layers(), min_size=1, max_size=12), st.integers(0, 300_000), st.sampled_from(sorted(quants.KV_TYPES)))
def test_kv_grows_with_tokens_and_never_faster_than_its_slope(stack: list[Layer], tokens: int, kv_type: str) -> None:
    model = shaped(*stack)
    here, next_one = shapes.kv_bytes(model, tokens, kv_type), shapes.kv_bytes(model, tokens + 1, kv_type)
    slope = shapes.kv_bytes_per_token(model, kv_type)
    floor = shapes.kv_bytes_per_token(model, kv_type, beyond_windows=True)
    assert floor <= next_one - here <= slope
    assert here <= slope * tokens
    windows = [layer.window for layer in stack if layer.kind == "sliding"]
    if tokens <= min(windows, default=tokens):
        assert here == slope * tokens


def test_an_unknown_kv_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CatalogError) as caught:
        shapes.kv_bytes_per_token(known("qwen3-8b"), "q3_0")
    assert "q8_0" in caught.value.hint
