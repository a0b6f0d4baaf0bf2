"""Convert a llama GGUF to a float32 mlx-lm checkpoint with exactly the dequantised values, to
compare two engines with one model.

python tests/models/mlx_from_gguf.py FILE.gguf FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize

from models.gguf_reader import GGUFReader

_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL = 3


def convert(source: Path, folder: Path) -> Path:
    """Write the checkpoint of `source` to `folder`, unless a finished one exists there."""
    if (folder / "config.json").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reader = GGUFReader(str(source))
    fields = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    if fields["general.architecture"] != "llama":
        raise SystemExit("only llama GGUFs are converted")
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in _TOP:
            weights[_TOP[tensor.name]] = values
            continue
        _, block, name, _ = tensor.name.split(".")
        if name in heads:
            values = _unpermuted(values, heads[name])
        weights[f"model.layers.{block}.{_NAMES[name]}.weight"] = values
    _write_weights(weights, folder)
    _write_tokenizer(fields, folder)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32",
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_attention_heads": heads["attn_q"], "num_key_value_heads": heads["attn_k"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": fields["llama.vocab_size"],
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    return folder


def _unpermuted(values: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo the permutation of llama.cpp's converter, which interleaves the halves of each head for
    its rope (convert_hf_to_gguf.py, LlamaModel.permute)."""
    rows, columns = values.shape
    return (
        values.reshape(n_heads, rows // n_heads // 2, 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
    )


def _write_weights(weights: dict[str, np.ndarray], folder: Path) -> None:
    import mlx.core as mx

    arrays = {name: mx.array(values) for name, values in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write a byte-level BPE like SmolLM2's tokenizer.json: digits one by one, then GPT-2's
    pattern."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [
        {
            "id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL
    ]  # fmt: skip
    pieces = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, pieces]
        },
        "post_processor": None, "decoder": pieces,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "model_max_length": fields["llama.context_length"], "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), "utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
