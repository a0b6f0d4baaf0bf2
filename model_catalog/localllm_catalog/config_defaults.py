"""What a config.json leaves out because its family says it: a nested text_config holds only what
differs from that.

From https://github.com/huggingface/transformers models/*/configuration_*.py (5.24.0), which write
configs so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 2048,
}  # fmt: skip
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_QWEN2 = _LLAMA | {
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2 = _GEMMA | {
    "num_hidden_layers": 26, "hidden_size": 2304, "intermediate_size": 9216,
    "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096,
}  # fmt: skip
_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral3": _MISTRAL
    | {"num_hidden_layers": 34, "head_dim": 128, "vocab_size": 131072,
    "max_position_embeddings": 262144},
    "mixtral": _MISTRAL | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_vl_text": _QWEN2 | {"head_dim": 128, "max_position_embeddings": 128000},
    "qwen2_vl_text": _QWEN2
    | {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 29568,
    "num_attention_heads": 64,
       "num_key_value_heads": 8, "vocab_size": 152064},
    "phi3": _LLAMA | {"hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064,
    "max_position_embeddings": 4096},
    "gemma": _GEMMA
    | {"num_hidden_layers": 28, "hidden_size": 3072, "intermediate_size": 24576,
    "num_attention_heads": 16, "vocab_size": 256000,
       "max_position_embeddings": 8192},
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2 | {"vocab_size": 262208, "max_position_embeddings": 131072},
    "gemma4_text": _GEMMA2
    | {"num_hidden_layers": 30, "vocab_size": 262144, "max_position_embeddings": 131072,
    "sliding_window": 512,
       "global_head_dim": 512},
    "mamba2": {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "vocab_size": 32768,
               "num_hidden_layers": 64, "hidden_size": 4096},
    "mamba": {"state_size": 16, "conv_kernel": 4, "vocab_size": 50280, "num_hidden_layers": 32,
    "hidden_size": 768,
              "tie_word_embeddings": True},
    "rwkv7": {"head_dim": 64},
}  # fmt: skip
# Which of them a type is that has none of its own: what it wraps, or what it is written like.
_LIKE = {
    "llava": "llama", "llava_next": "llama", "llava_onevision": "qwen2", "vipllava": "llama",
    "pixtral": "mistral",
    "mistral3": "ministral3", "idefics2": "mistral", "paligemma": "gemma", "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen2_5_vl_text": "qwen2_vl_text", "qwen3_vl": "qwen3_vl_text", "falcon_mamba": "mamba",
}  # fmt: skip


def wrapped(model_type: str) -> str:
    """The type of the language model in one that wraps it without saying which ("llava":
    "llama")."""
    return _LIKE.get(model_type, model_type)


def of_type(model_type: str) -> Mapping[str, Any]:
    """What a config of this type means where it says nothing; {} for a type that is not known."""
    return _OF_TYPE.get(wrapped(model_type), {})
