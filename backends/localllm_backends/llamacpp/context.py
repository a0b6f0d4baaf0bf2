"""Turn a LoadSpec into the parameters of llama_model and llama_context: placement of layers,
experts and KV, batch, outputs and threads.

llama.cpp counts layers from the end: the last `n_gpu_layers` layers, including the output layer,
are on the devices. Patterns for tensor names override that for single tensors.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm_backends.contract import (
    LoadError,
    LoadSpec,
    OutOfMemoryError,
    Placement,
)
from localllm_backends.llamacpp.adapters import apply_adapters
from localllm_backends.llamacpp.devices import accelerators, has_gpu
from localllm_backends.llamacpp.native import (
    ggml_type,
    log,
    mappings,
    start_native,
)
from localllm_backends.llamacpp.threads import usable_cores

# llama.h: enum llama_load_mode, enum llama_lazy_mode
_LOAD_MODES = {"auto": "AUTO", "read": "NONE", "mapped": "MMAP"}
_LAZY_MODES = {"memory": "OFF", "auto": "AUTO", "disk": "ON"}
# Names as in llama.cpp's own tools; `ch` are experts that are split over several tensors.
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_MADV_DONTNEED = 4
# An empty, null-terminated list of devices.
_NO_DEVICES = (ctypes.c_void_p * 1)()


def experts_pattern(n_layers: int) -> str:
    """Return the name pattern of the routed experts in the first `n_layers` layers (-1: all
    layers)."""
    if n_layers < 0:
        return rf"blk\.\d+{_EXPERTS}"
    numbers = "|".join(str(i) for i in range(n_layers))
    return rf"blk\.({numbers}){_EXPERTS}"


def model_params(llama: Any, spec: LoadSpec) -> Any:
    """Return llama_model_params that place the weights as in `spec`."""
    placed = spec.placement
    params = llama.llama_model_default_params()
    params.n_gpu_layers = spec.n_gpu_layers if spec.n_gpu_layers >= 0 else 999
    if not spec.n_gpu_layers:
        # With a device, llama.cpp would allocate memory there and send large products of CPU layers
        # to it.
        params.devices = _NO_DEVICES
    _set_load_mode(llama, params, placed)
    llama.set_fields(params, use_extra_bufts=placed.layout != "stored")
    # Keeps alive what the parameters point to.
    keep_alive: list[Any] = []
    params.kept = keep_alive
    if placed.experts_on_host:
        processor = llama.ggml_backend_dev_by_type(llama.GGML_BACKEND_DEVICE_TYPE_CPU)
        system_memory = llama.ggml_backend_dev_buffer_type(processor)
        pattern = experts_pattern(placed.experts_on_host).encode()
        override = llama.llama_model_tensor_buft_override
        # An override without a pattern ends the list.
        keep_alive.append((override * 2)(override(pattern, system_memory), override()))
        params.tensor_buft_overrides = keep_alive[-1]
    if placed.cards and spec.n_gpu_layers:
        chosen = [device.handle for device in accelerators(placed.cards)]
        keep_alive.append((ctypes.c_void_p * (len(chosen) + 1))(*chosen, None))
        params.devices = keep_alive[-1]
    if placed.tensor_split:
        max_devices = int(llama.llama_max_devices())
        if len(placed.tensor_split) > max_devices:
            raise LoadError(
                f"llama.cpp can split a model over at most {max_devices} devices, but the "
                f"plan names {len(placed.tensor_split)}"
            )
        keep_alive.append((ctypes.c_float * max_devices)(*placed.tensor_split))
        params.tensor_split = keep_alive[-1]
    return params


def _set_load_mode(llama: Any, params: Any, placed: Placement) -> None:
    """Set how weights and tables are read. Releases before the load modes only map files or not."""
    if llama.has_field("llama_model_params", "load_mode"):
        params.load_mode = getattr(llama, f"LLAMA_LOAD_MODE_{_LOAD_MODES[placed.weights]}")
    else:
        llama.set_fields(params, use_mmap=placed.weights != "read")
    if llama.has_field("llama_model_params", "lazy_mode"):
        params.lazy_mode = getattr(llama, f"LLAMA_LAZY_MODE_{_LAZY_MODES[placed.tables]}")


def release_pages(path: Path) -> None:
    """Release the pages of `path` that are mapped into this process. Linux only.

    Weights that llama.cpp repacked or copied to a device are still resident in the mapped file.
    Pages that are still used return from the system's file cache at the next access.
    """
    if sys.platform == "linux":
        release = ctypes.CDLL(None).madvise
        for start, stop in mapped_at(path):
            release(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


def mapped_at(path: Path) -> list[tuple[int, int]]:
    """Return the (start, stop) addresses at which `path` is mapped into this process.

    Returns an empty list if that can't be read.
    """
    name = str(path.resolve())
    return [(start, stop) for start, stop, file in mappings() if file == name]


# Tokens of a micro-batch; larger ones gain little. A step is one micro-batch, or up to `_GPU_STEP`
# tokens on a GPU, as in llama.cpp's own programs. A GPU can compute the next micro-batch while the
# host still handles the previous one.
_MICRO_BATCH = 512
_GPU_STEP = 2048
_DEFAULT_CTX = 8192
_DRAFT_CELLS = 48


def served_context(model: Any, spec: LoadSpec) -> int:
    """Return the context to serve in tokens: as requested, else the model's own up to a default
    limit."""
    return spec.n_ctx or min(int(start_native().llama_model_n_ctx_train(model)), _DEFAULT_CTX)


def _steps_are_divisible(model: Any, spec: LoadSpec) -> bool:
    """Return whether a step on a GPU may consist of several micro-batches.

    All of them must be revocable, so the model must have no window or recurrent state to overwrite.
    Draft heads and images also need a step to be one micro-batch.
    """
    if spec.n_gpu_layers == 0 or not has_gpu():
        return False
    if spec.mtp or spec.drafter or spec.projector:
        return False
    llama = start_native()
    if llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model):
        return False
    return not llama.llama_model_n_swa(model)


def new_context(
    model: Any,
    spec: LoadSpec,
    *,
    n_seq_max: int,
    mtp: bool = False,
    at_node: Any = None,
    target: Any = None,
    n_batch: int = 0,
    draft_cells: int = 0,
) -> Any:
    """Create the llama_context for `model`, or with `mtp` the one for its draft heads.

    Raises OutOfMemoryError or LoadError with the reason.

    If `target` is set, it is the context of the model for which `model` drafts. Its steps have
    `n_batch` tokens; the new context gets `draft_cells` more cells for drafts.

    `at_node`: a ggml_backend_sched_eval_callback that may pause or end the computation.
    """
    llama = start_native()
    drafts = mtp or target is not None
    n_batch = n_batch or spec.n_batch or _MICRO_BATCH
    n_ctx = served_context(model, spec)
    if drafts:
        # Cells for the model's tokens, for draft tokens, and for tokens that the heads must read
        # again after a fork.
        n_ctx += (_DRAFT_CELLS + draft_cells) * n_seq_max
    n_step = n_batch
    if at_node is None and target is None and _steps_are_divisible(model, spec):
        n_step = max(n_batch, _GPU_STEP)
    # llama.cpp aborts the process if a step has more logit rows than are reserved here, or if fewer
    # rows are reserved than there are sequences. Each row costs n_vocab × 4 bytes.
    n_outputs = max(spec.outputs_of(n_batch), n_seq_max)
    optional: dict[str, Any] = {}
    if mtp:
        n_heads = max(1, int(llama.llama_model_n_layer_nextn(model)))
        n_outputs = min(n_batch, n_seq_max * n_heads)
        optional["ctx_type"] = llama.LLAMA_CONTEXT_TYPE_MTP
    if target is not None:
        n_outputs = n_batch
        optional["ctx_other"] = target
    n_threads = spec.n_threads or usable_cores()
    # Flash attention stays at AUTO: if a device lacks the kernel, ON would silently compute
    # attention on the CPU.
    kv_cache = {
        "type_k": ggml_type(spec.kv_type_k),
        "type_v": ggml_type(spec.kv_type_v),
        "kv_unified": True,
        "swa_full": False,
        "offload_kqv": not spec.placement.kv_on_host,
    }
    context = made_context(
        model,
        n_ctx=n_ctx,
        n_ubatch=n_batch,
        n_batch=n_step,
        n_seq_max=n_seq_max,
        n_outputs_max=n_outputs,
        n_rs_seq=0 if drafts else spec.n_rewind,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        # May devices compute with weights in system memory?
        op_offload=spec.n_gpu_layers != 0,
        cb_eval=at_node or llama.ggml_backend_sched_eval_callback(),
        **kv_cache,
        **optional,
    )
    apply_adapters(context, spec.adapters)
    return context


@contextmanager
def trial_context(model: Any, spec: LoadSpec, kv: Sequence[str], **sizes: int) -> Iterator[Any]:
    """Create a small context with the KV types `kv` (K, V), in addition to the serving context.

    `sizes` are its n_ctx, n_batch and n_outputs.
    """
    trial_spec = replace(spec, n_rewind=0, mtp=False, drafter="")
    typed: Any = {"kv_type_k": kv[0], "kv_type_v": kv[1], **sizes}
    context = new_context(model, replace(trial_spec, **typed), n_seq_max=1)
    try:
        yield context
    finally:
        start_native().llama_free(context)


def made_context(model: Any, **parameters: Any) -> Any:
    """Create a llama_context with these llama_context_params; the others keep llama.cpp's defaults.

    Parameters that this llama.cpp does not have are left out.

    Raises OutOfMemoryError or LoadError with llama.cpp's reason.
    """
    llama = start_native()
    n_ctx = parameters["n_ctx"]
    params = llama.llama_context_default_params()
    llama.set_fields(params, **parameters)
    log.mark()
    context = llama.llama_init_from_model(model, params)
    if not context:
        reason = log.reason()
        if "alloc" in reason:
            raise OutOfMemoryError(f"not enough memory for a context of {n_ctx} tokens: {reason}")
        raise LoadError(f"llama.cpp can't make a context of {n_ctx} tokens: {reason}")
    return context
