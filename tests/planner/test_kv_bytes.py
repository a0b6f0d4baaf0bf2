"""KV bytes from shapes: llama.cpp's allocations, and the relations between context and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.planner import kv_sizes
from localllm.planner.decode_cost import kv_read_bytes
from localllm.planner.types import RunSettings
from localllm_catalog import catalog, quants, shapes
from localllm_catalog.layers.feed_forward import FeedForward
from localllm_catalog.layers.full import Full
from localllm_catalog.layers.indexed import Indexed
from localllm_catalog.layers.latent import Latent
from localllm_catalog.layers.recurrent import Recurrent
from localllm_catalog.layers.shared import Shared
from localllm_catalog.layers.sliding import Sliding
from localllm_catalog.types import Layer, Model

MIB = 1 << 20
CATALOG = catalog.load()


def known(model_id: str) -> Model:
    model = CATALOG.get(model_id)
    assert model is not None
    return model


def shaped(*layers: Layer) -> Model:
    return replace(known("qwen3-8b"), layers=layers, variants=())


# Measured with llama.cpp's own allocator (no_alloc, llama-cpp-python 0.3.36), in MiB, with the full
# length in all layers.
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
def test_kv_bytes_are_those_llama_cpp_allocates(
    model_id: str, tokens: int, kv_type: str, mib: int
) -> None:
    assert (
        kv_sizes.kv_bytes(known(model_id), RunSettings(tokens).with_kv_type(kv_type)) == mib * MIB
    )


def test_kv_bytes_of_deepseek_v2_lite_match_a_measurement() -> None:
    layer = Layer(Latent(mla_rank=512, mla_rope_dim=64, head_dim_k=192, head_dim_v=128))
    lite = shaped(*[layer] * 27)
    assert kv_sizes.kv_bytes(lite, RunSettings(4096)) / MIB == 121.5
    assert kv_sizes.kv_bytes(lite, RunSettings(32_768)) / MIB == 972
    assert kv_sizes.kv_bytes(lite, RunSettings(32_768).with_kv_type("q8_0")) / MIB == pytest.approx(
        516.38, abs=0.01
    )


@pytest.mark.parametrize(
    ("model_id", "per_token", "long_per_token", "at_131072"),
    [
        # 18 of 36 layers store 128 tokens: 36,864 × 131,072 + 36,864 × 128.
        ("gpt-oss-120b", 73_728, 36_864, 4_836_556_800),
        # 52 of 62 layers store 1,024 tokens: 81,920 × 131,072 + 425,984 × 1,024.
        ("gemma-3-27b-it", 507_904, 81_920, 11_173_625_856),
        ("gemma-3-4b-it", 139_264, 20_480, 20_480 * 131_072 + 118_784 * 1_024),
    ],
)
def test_a_token_reads_no_more_than_the_window_of_a_sliding_layer(
    model_id: str, per_token: int, long_per_token: int, at_131072: int
) -> None:
    model = known(model_id)
    assert shapes.kv_bytes_per_token(model) == per_token
    assert kv_sizes.kv_bytes_per_1k_tokens(model) == 1024 * long_per_token
    assert kv_read_bytes(model, 131_072) == at_131072


widths = st.integers(1, 16).map(lambda n: 32 * n)
heads = st.integers(1, 16)
attention = st.one_of(
    st.builds(Full, n_kv_heads=heads, head_dim_k=widths, head_dim_v=widths),
    st.builds(
        Sliding,
        n_kv_heads=heads,
        head_dim_k=widths,
        head_dim_v=widths,
        window=st.integers(1, 5000),
    ),
    st.builds(Latent, mla_rank=widths, mla_rope_dim=st.just(64)),
)
mixers = st.one_of(
    attention,
    st.builds(Shared, attention),
    st.builds(Indexed, attention, index_dim=widths),
    st.builds(Recurrent, state_elements=st.integers(0, 1 << 20)),
    st.just(FeedForward()),
)
layers = st.builds(Layer, mixers)


@given(
    st.lists(layers, min_size=1, max_size=12),
    st.integers(1, 1000),
    st.sampled_from(sorted(quants.KV_TYPES)),
)
def test_kv_grows_with_the_context_and_never_faster_than_its_slope(
    stack: list[Layer], n_steps: int, kv_type: str
) -> None:
    model, n_ctx = shaped(*stack), kv_sizes.CONTEXT_STEP * n_steps
    here, further = (
        kv_sizes.kv_bytes(model, RunSettings(n).with_kv_type(kv_type))
        for n in (n_ctx, n_ctx + kv_sizes.CONTEXT_STEP)
    )
    slope = shapes.kv_bytes_per_token(model, kv_type)
    floor = kv_sizes.kv_bytes_per_1k_tokens(model, kv_type) * kv_sizes.CONTEXT_STEP // 1024
    # Fractions of a byte are rounded on both sides.
    assert floor - 1 <= further - here <= slope * kv_sizes.CONTEXT_STEP + 1
    assert here <= slope * n_ctx
    windows = [layer.mixer.reach for layer in stack if layer.mixer.is_bounded]
    if n_ctx <= min(windows, default=n_ctx):
        assert here == pytest.approx(slope * n_ctx, abs=n_ctx)
