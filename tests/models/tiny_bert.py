"""A BERT with random weights and a few hundred word pieces: an embedding model that loads in
milliseconds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

E, HEADS, FF, LAYERS, CTX = 32, 2, 64, 2, 128
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?"


def write_bert(path: Path, *, pooling: int = 1, seed: int = 5, template: str | None = None) -> Path:
    """Write the model; `pooling` as in llama.h (1 mean, 2 CLS, 4 rank: with a head that scores),
    `template` for pairs."""
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(str(path), "bert")
    w.add_name("tiny-bert")
    w.add_context_length(CTX)
    w.add_embedding_length(E)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FF)
    w.add_head_count(HEADS)
    w.add_layer_norm_eps(1e-12)
    w.add_causal_attention(False)
    w.add_pooling_type(gguf.PoolingType(pooling))
    # Word pieces as in llama.cpp: the beginning of a word has the prefix U+2581, later pieces have
    # none.
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{c}" for c in LETTERS), *LETTERS]
    kinds = [gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL] * (len(tokens) - 5)
    if template:
        w.add_string("tokenizer.chat_template.rerank", template)
    w.add_tokenizer_model("bert")
    w.add_token_type_count(2)
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_unk_token_id(1)
    w.add_sep_token_id(3)
    w.add_pad_token_id(0)
    w.add_bos_token_id(2)
    w.add_eos_token_id(3)
    w.add_add_bos_token(True)
    w.add_add_eos_token(True)

    def add(name: str, *shape: int, scale: float = 0.2, around: float = 0.0) -> None:
        w.add_tensor(name, (around + rng.standard_normal(shape) * scale).astype(np.float32))

    add("token_embd.weight", len(tokens), E, scale=1.0)
    add("position_embd.weight", CTX, E)
    add("token_types.weight", 2, E)
    norms = ["token_embd_norm"]
    for i in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{part}.weight", E, E)
            add(f"blk.{i}.{part}.bias", E)
        add(f"blk.{i}.ffn_up.weight", FF, E)
        add(f"blk.{i}.ffn_up.bias", FF)
        add(f"blk.{i}.ffn_down.weight", E, FF)
        add(f"blk.{i}.ffn_down.bias", E)
        norms += [f"blk.{i}.attn_output_norm", f"blk.{i}.layer_output_norm"]
    for norm in norms:
        add(f"{norm}.weight", E, around=1.0)
        add(f"{norm}.bias", E)
    if pooling == 4:
        add("cls.weight", E, E)
        add("cls.bias", E)
        add("cls.output.weight", 1, E)
        add("cls.output.bias", 1)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
