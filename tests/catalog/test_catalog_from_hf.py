"""The config.json of MLX and Hugging Face folders gives the same shapes as the curated catalog."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm_catalog import catalog, shapes
from localllm_catalog.errors import BadHeaderError
from localllm_catalog.from_hf import model_from_config, quant_of

FILES = {"model-00001-of-00002.safetensors": 4_000_000_000,
    "model-00002-of-00002.safetensors": 600_000_000,
         "tokenizer.json": 11_000_000, "config.json": 900}  # fmt: skip

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "use_sliding_window": False,
    "sliding_window": None, "quantization": {"group_size": 64, "bits": 4},
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": {
        **QWEN3_8B, "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
        "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
    "gemma-3-27b-it": {
        "model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
            "vocab_size": 262208,
            "max_position_embeddings": 131072, "sliding_window": 1024, "sliding_window_pattern": 6,
            "tie_word_embeddings": True},
    },
    "gemma-4-e2b-it": {
        "model_type": "gemma4", "text_config": {
            "model_type": "gemma4_text", "num_hidden_layers": 35, "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
            "global_head_dim": 512,
            "vocab_size": 262144, "max_position_embeddings": 131072, "sliding_window": 512,
            "num_kv_shared_layers": 20,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 256, "tie_word_embeddings": True},
    },
    "gemma-4-31b-it": {
        "model_type": "gemma4", "text_config": {
            "model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 4, "attention_k_eq_v": True, "vocab_size": 262144,
            "max_position_embeddings": 262144, "sliding_window": 1024, "tie_word_embeddings": True},
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "max_position_embeddings": 131072, "sliding_window": 128, "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "qwen3.6-27b": {
        "model_type": "qwen3_5", "text_config": {
            "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
            "vocab_size": 248320,
            "max_position_embeddings": 262144, "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1, "tie_word_embeddings": False},
    },
    "lfm2.5-1.2b-instruct": {
        "model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536,
        "max_position_embeddings": 32768,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "tie_word_embeddings": True,
    },
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h", "num_hidden_layers": 52, "hidden_size": 2688,
        "intermediate_size": 1856,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 262144, "ssm_state_size": 128, "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8, "conv_kernel": 4, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "tie_word_embeddings": False,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    },
    "granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 1536,
        "intermediate_size": 512,
        "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100352,
        "max_position_embeddings": 131072,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "mamba_n_heads": 48,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 154880,
        "max_position_embeddings": 202752,
        "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_id", CONFIGS)
def test_a_config_gives_the_shapes_the_catalog_has(model_id: str) -> None:
    curated = catalog.load().get(model_id)
    assert curated is not None
    model = model_from_config(CONFIGS[model_id], FILES)
    assert [layer.kind for layer in model.layers] == [layer.kind for layer in curated.layers]
    kept = [
        [(layer.mixer.elements, layer.mixer.reach) for layer in m.layers] for m in (model, curated)
    ]
    assert kept[0] == kept[1]
    assert shapes.recurrent_state_bytes(model) == shapes.recurrent_state_bytes(curated)
    total, active = shapes.count_params(curated)
    assert (model.params_total, model.params_active) == (total - curated.extra_params, active)
    assert model.mtp_layers == curated.mtp_layers
    assert model.shape_warning == ""


def test_the_variant_has_the_folders_bytes() -> None:
    (variant,) = model_from_config(QWEN3_8B, FILES, repo="mlx-community/Qwen3-8B-4bit").variants
    assert (variant.format, variant.quant) == ("mlx", "4bit")
    assert variant.weights_bytes == 4_600_000_000
    assert variant.file_bytes == 4_611_000_900
    assert variant.exact
    model = model_from_config(QWEN3_8B, FILES, repo="mlx-community/Qwen3-8B-4bit")
    assert model.id == "qwen3-8b-4bit"


def test_tools_and_reasoning_are_detected_from_the_template() -> None:
    model = model_from_config(QWEN3_8B, FILES, template="{% if x %}<tool_call>{% endif %}<think>")
    assert model.calls_tools
    assert model.reasoning_kind == "hybrid"


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"group_size": 64, "bits": 8}, "8bit"),
        ({"group_size": 32, "bits": 4, "mode": "affine"}, "4bit-g32"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "mxfp4"),
        ({"group_size": 16, "bits": 4, "mode": "nvfp4"}, "nvfp4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (None, "bf16"),
    ],
)
def test_the_quantization_section_is_named(section: dict[str, Any] | None, name: str) -> None:
    assert quant_of({"quantization": section}) == name


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": "36"},
        {"hidden_size": -1},
        {"hidden_size": True},
        {"num_attention_heads": 0},
        {"vocab_size": None},
        {"layer_types": ["telepathy"] * 36},
        {"num_experts": 4, "num_experts_per_tok": 9},
        {"num_kv_shared_layers": 99},
        {"kv_lora_rank": 512},
        {"layer_types": ["linear_attention"] * 36},
    ],
)
def test_inconsistent_configs_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadHeaderError):
        model_from_config({**QWEN3_8B, **change}, FILES)


def test_a_folder_without_weights_is_refused() -> None:
    with pytest.raises(BadHeaderError):
        model_from_config(QWEN3_8B, {"config.json": 10})


junk = (
    st.none()
    | st.booleans()
    | st.integers(-5, 1 << 70)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers())
)


@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_junk_in_any_field_is_an_error_or_a_model(model_id: str, data: st.DataObject) -> None:
    config = CONFIGS[model_id]
    inner = config.get("text_config", config)
    key = data.draw(st.sampled_from(sorted(inner)))
    changed = {**inner, key: data.draw(junk)}
    try:
        model = model_from_config(
            {**config, "text_config": changed} if "text_config" in config else changed, FILES
        )
    except Exception as error:
        assert isinstance(error, BadHeaderError), repr(error)  # noqa: PT017
    else:
        assert model.layers
