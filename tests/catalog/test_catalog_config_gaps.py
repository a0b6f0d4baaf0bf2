"""Values missing from a config.json come from its family. Weights in another program's format are
identified."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm_catalog import config_defaults, shapes
from localllm_catalog.errors import BadHeaderError
from localllm_catalog.from_hf import foreign_format, model_from_config
from localllm_catalog.types import Model

FILES = {"model.safetensors": 4_000_000_000}
GEMMA_4B = {
    "model_type": "gemma3", "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "sliding_window": 1024},
}  # fmt: skip
PIXTRAL = {
    "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336,
    "max_position_embeddings": 1024000, "model_type": "mistral",
    "num_hidden_layers": 40, "num_key_value_heads": 8, "sliding_window": None, "vocab_size": 131072,
}  # fmt: skip
VICUNA = {
    "_name_or_path": "lmsys/vicuna-7b-v1.5",
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "vocab_size": 32064,
}
# Published configs: (layers, heads, head_dim, KV bytes per token at f16, context).
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int]]] = {
    "gemma-3-4b": (GEMMA_4B, (34, 8, 256, 34 * 4 * 256 * 4, 131072)),
    "llava-1.5-7b": ({"model_type": "llava", "text_config": VICUNA, "vocab_size": 32064},
    (32, 32, 128, 32 * 32 * 128 * 4, 4096)),
    "llava without a type": ({"model_type": "llava", "text_config": {"vocab_size": 32064}},
    (32, 32, 128, 32 * 32 * 128 * 4, 2048)),
    "pixtral-12b": ({"model_type": "llava", "text_config": PIXTRAL},
    (40, 32, 128, 40 * 8 * 128 * 4, 1024000)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_nested_config_overrides_the_defaults_of_its_family(name: str) -> None:
    config, expected = PUBLISHED[name]
    model = model_from_config(config, FILES)
    assert (len(model.layers), model.n_heads, model.head_dim) == expected[:3]
    assert (shapes.kv_bytes_per_token(model), model.native_context) == expected[3:]
    assert model.shape_warning == ""


NESTED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "qwen2_vl_text",
)


def facts(model: Model) -> tuple[object, ...]:
    return (
        model.layers,
        model.hidden_size,
        model.n_heads,
        model.vocab_size,
        model.native_context,
        model.params_total,
    )


@given(st.sampled_from(NESTED), st.data())
def test_leaving_out_defaults_of_the_family_changes_no_shape(
    kind: str, data: st.DataObject
) -> None:
    whole = {"model_type": kind, **config_defaults.of_type(kind)}
    kept = data.draw(st.lists(st.sampled_from(sorted(config_defaults.of_type(kind))), unique=True))
    less = {"model_type": kind} | {key: whole[key] for key in kept}
    nulls = {key: None for key in config_defaults.of_type(kind) if key not in kept}
    models = [
        model_from_config({"model_type": "x", "text_config": c}, FILES)
        for c in (whole, less, {**less, **nulls})
    ]
    assert facts(models[0]) == facts(models[1]) == facts(models[2])


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
)
def test_a_value_missing_in_config_and_family_is_named(key: str) -> None:
    config = {
        "model_type": "novel",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 300,
    }
    config.pop(key)
    for nested in (config, {"model_type": "novel_vl", "text_config": config}):
        with pytest.raises(
            BadHeaderError, match=f"{key} is missing, and the value that novel"
        ) as e:
            model_from_config(nested, FILES)
        assert "GGUF" in e.value.hint


RECURRENT: dict[str, tuple[dict[str, Any], int]] = {
    # State: (conv - 1) × channels + inner × state, in float32 elements. For rwkv7: heads × head²
    # and two shifts.
    "mamba2": ({"num_heads": 24, "head_dim": 64, "hidden_size": 768, "state_size": 128,
    "n_groups": 1, "conv_kernel": 4,
                "num_hidden_layers": 24, "vocab_size": 50288, "intermediate_size": 1536},
                3 * (1536 + 256) + 128 * 1536),
    "mamba": ({"hidden_size": 768, "intermediate_size": 1536, "state_size": 16, "conv_kernel": 4,
    "num_hidden_layers": 24,
               "vocab_size": 50280, "time_step_rank": 48}, 3 * 1536 + 16 * 1536),
    "falcon_mamba": ({"hidden_size": 4096, "intermediate_size": 8192, "state_size": 16,
    "num_hidden_layers": 64,
                      "vocab_size": 65024, "time_step_rank": "auto"}, 3 * 8192 + 16 * 8192),
    "rwkv7": ({"hidden_size": 768, "head_dim": 64, "intermediate_size": 3072,
    "num_hidden_layers": 12, "vocab_size": 65536,
               "a_low_rank_dim": 64, "decay_low_rank_dim": 64}, 768 * 64 + 2 * 768),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_model_without_attention_has_a_state_and_no_kv_cache(kind: str) -> None:
    config, state = RECURRENT[kind]
    model = model_from_config({"model_type": kind, **config}, FILES)
    assert {layer.kind for layer in model.layers} == {"recurrent"}
    assert {layer.mixer.state_floats for layer in model.layers} == {state}
    assert shapes.kv_bytes_per_token(model) == 0
    assert model.shape_warning == ""
    assert 0.08e9 < model.params_total < 8e9


def test_values_of_single_gemma_4_layers_are_read_in_every_form() -> None:
    text: dict[str, Any] = {"model_type": "gemma4_text", "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 4,
                            "hidden_size": 2304, "vocab_size": 262144, "head_dim": 256}  # fmt: skip
    own = {"head_dim": 512, "num_key_value_heads": 2}
    plain = model_from_config({"model_type": "gemma4", "text_config": text}, FILES)
    assert [layer.mixer.row[0] for layer in plain.layers] == ([4 * 256] * 5 + [4 * 512]) * 2
    for said in (
        {"5": own, "11": own},
        {5: own, 11: own},
        {"full_attention": own},
        [*[None] * 5, own, *[None] * 5, own],
    ):
        model = model_from_config(
            {"model_type": "gemma4", "text_config": {**text, "per_layer_config": said}}, FILES
        )
        kept = [layer.mixer for layer in model.layers]
        assert [mixer.row for mixer in kept] == (
            [(4 * 256, 4 * 256)] * 5 + [(2 * 512, 2 * 512)]
        ) * 2
        assert [mixer.head_counts[-1] for mixer in kept] == ([4] * 5 + [2]) * 2
    one = model_from_config(
        {"model_type": "gemma4", "text_config": {**text, "per_layer_config": {"11": own}}}, FILES
    )
    assert shapes.kv_bytes_per_token(one) < shapes.kv_bytes_per_token(plain)


FOREIGN: dict[str, dict[str, Any]] = {
    "FP8": {"quant_method": "fp8", "fmt": "e4m3"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
    },
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "hqq": {"quant_method": "hqq"},
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_weights_in_a_format_of_another_program_are_refused_by_name(name: str, place: str) -> None:
    section = FOREIGN[name]
    plain = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 300,
    }
    config: dict[str, Any] = {**plain, place: section}
    if place == "text_config":
        config = {"model_type": "x", "text_config": {**plain, "quantization_config": section}}
    assert name in foreign_format(config)
    with pytest.raises(BadHeaderError, match=f"in {name}.*MLX can't run") as e:
        model_from_config(config, FILES)
    assert "mlx-community" in e.value.hint


@pytest.mark.parametrize(
    "section",
    [{"bits": 4, "group_size": 64}, {"quant_method": "mxfp4"}, {"mode": "nvfp4", "bits": 4}, {}],
)
def test_formats_of_mlx_are_not_taken_for_another_program(section: dict[str, Any]) -> None:
    assert foreign_format({"quantization_config": section}) == ""
    converted = {
        "quantization": {"bits": 4, **section},
        "quantization_config": {**section, "quant_method": "awq"},
    }
    assert foreign_format(converted) == ""
