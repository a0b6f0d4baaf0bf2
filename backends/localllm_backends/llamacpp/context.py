"""A llama_context over loaded weights: how many tokens, rows of logits and threads it gets."""

from __future__ import annotations

from typing import Any

from localllm_backends.contract import LoadError, LoadSpec, OutOfMemoryError
from localllm_backends.llamacpp.cores import usable_cores
from localllm_backends.llamacpp.native import GGML_TYPES, cause, has_gpu, start_native
from localllm_backends.llamacpp.native_log import log
from localllm_backends.llamacpp.placing import place_context

# Tokens of a step at most, which is one micro-batch: larger ones bring little.
_CPU_BATCH = 512
_GPU_BATCH = 512
_DEFAULT_CTX = 8192
_OUTPUTS_PER_SEQUENCE = 16
_MAX_OUTPUTS = 64
_DRAFT_CELLS = 48
_FLASH_AUTO, _FLASH_OFF = -1, 0


def outputs_reserved(spec: LoadSpec, n_batch: int) -> int:
    """Rows of logits a step may ask for. llama.cpp aborts the process beyond what was reserved, and every row costs
    n_vocab × 4 bytes, so the number is set once here and held by `step`."""
    return min(n_batch, spec.n_outputs or min(_MAX_OUTPUTS, spec.n_seq_max * _OUTPUTS_PER_SEQUENCE))


def served_context(model: Any, spec: LoadSpec) -> int:
    """Tokens of context to serve: what is asked for, else the model's own up to a modest size."""
    return spec.n_ctx or min(int(start_native().llama_model_n_ctx_train(model)), _DEFAULT_CTX)


def new_context(model: Any, spec: LoadSpec, *, n_seq_max: int, mtp: bool = False, at_node: Any = None) -> Any:
    """The llama_context for `model`, or with `mtp` the one its draft heads run in; OutOfMemoryError or LoadError with
    the reason otherwise. `at_node`: a ggml_backend_sched_eval_callback, which may pause or end what it computes."""
    llama = start_native()
    params = llama.llama_context_default_params()
    n_batch = spec.n_batch or (_GPU_BATCH if has_gpu() and spec.n_gpu_layers != 0 else _CPU_BATCH)
    threads = spec.n_threads or usable_cores()
    params.n_ctx = served_context(model, spec)
    params.n_batch = n_batch
    # One micro-batch per step keeps a step all-or-nothing.
    params.n_ubatch = n_batch
    params.n_seq_max = n_seq_max
    # llama.cpp aborts the process where there is less than one row for each sequence.
    params.n_outputs_max = max(outputs_reserved(spec, n_batch), n_seq_max)
    params.n_rs_seq = spec.n_rewind
    if mtp:
        heads = max(1, int(llama.llama_model_n_layer_nextn(model)))
        params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
        # Beside what the model holds, room for what is being drafted, and for what a fork has to read for itself.
        params.n_ctx += _DRAFT_CELLS * n_seq_max
        params.n_outputs_max = min(n_batch, n_seq_max * heads)
        params.n_rs_seq = 0
    params.n_threads = threads
    params.n_threads_batch = spec.n_threads_batch or threads
    # AUTO, not ON: where a device lacks the kernel, ON would silently compute attention on the CPU.
    params.flash_attn_type = _FLASH_AUTO if spec.flash_attention else _FLASH_OFF
    params.type_k = GGML_TYPES[spec.kv_type_k]
    params.type_v = GGML_TYPES[spec.kv_type_v]
    params.kv_unified = True
    params.swa_full = False
    params.no_perf = True
    place_context(params, spec)
    if at_node is not None:
        params.cb_eval = at_node
    log.mark()
    context = llama.llama_init_from_model(model, params)
    if not context:
        why = cause("llama.cpp gave no reason")
        if "alloc" in why:
            raise OutOfMemoryError(f"not enough memory for a context of {params.n_ctx} tokens: {why}")
        raise LoadError(f"llama.cpp can't make a context of {params.n_ctx} tokens: {why}")
    return context
