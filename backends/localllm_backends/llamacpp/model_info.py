"""What a loaded GGUF says of itself, for the engine, the templates and the faces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadSpec, ModelInfo
from localllm_backends.llamacpp.native import c_string
from localllm_backends.llamacpp.vocabulary import Vocabulary
from localllm_backends.llamacpp.weights import kv_meaning

_FIM = ("pre", "suf", "mid", "pad", "rep", "sep")


def model_info(words: Vocabulary, llama: Any, model: Any, spec: LoadSpec, **served: Any) -> ModelInfo:
    """The facts of `model`; `served` are those of what was made of it (fingerprint, n_ctx, n_seq_max …)."""
    vocab = llama.llama_model_get_vocab(model)
    n_vocab = int(llama.llama_vocab_n_tokens(vocab))
    metadata = {}
    for i in range(llama.llama_model_meta_count(model)):
        key = c_string(llama.llama_model_meta_key_by_index, model, i)
        value = c_string(llama.llama_model_meta_val_str_by_index, model, i)
        if key and value is not None and not key.startswith("tokenizer.") and len(value) < 1000:
            metadata[key] = value
    template = llama.llama_model_chat_template(model, None)
    bos, eos = int(llama.llama_vocab_bos(vocab)), int(llama.llama_vocab_eos(vocab))
    fim = {name: int(getattr(llama, f"llama_vocab_fim_{name}")(vocab)) for name in _FIM}

    def text(token: int) -> str:
        return words.token_bytes(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    return ModelInfo(
        architecture=metadata.get("general.architecture", ""),
        description=metadata.get("general.name") or Path(spec.path).stem,
        n_vocab=n_vocab,
        n_ctx_train=int(llama.llama_model_n_ctx_train(model)),
        n_params=int(llama.llama_model_n_params(model)),
        weights_bytes=int(llama.llama_model_size(model)),
        eog_tokens=tuple(t for t in range(n_vocab) if llama.llama_vocab_is_eog(vocab, t)),
        bos_token=bos if bos >= 0 else None,
        eos_token=eos if eos >= 0 else None,
        adds_bos=bool(llama.llama_vocab_get_add_bos(vocab)),
        bos_text=text(bos),
        eos_text=text(eos),
        chat_template=template.decode("utf-8", "replace") if template else None,
        kv_type_k=spec.kv_type_k,
        kv_type_v=spec.kv_type_v,
        kv_meaning=kv_meaning(llama, spec),
        fim_tokens={name: token for name, token in fim.items() if token >= 0},
        metadata=metadata,
        **served,
    )
