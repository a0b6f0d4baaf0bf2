"""From a LoadSpec to a loaded llama.cpp model and context, or one sentence saying why not."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm_backends.contract import LoadError, LoadSpec, OutOfMemoryError
from localllm_backends.llamacpp.native_log import log

if TYPE_CHECKING:
    from localllm_backends.llamacpp.backend import LlamaCppBackend

# ggml.h: enum ggml_type
GGML_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip

# On a CPU steps of 256 tokens prefill as fast as steps of 512 (128: 3 to 4 % slower), in half the memory.
_CPU_BATCH = 256
_GPU_BATCH = 512
_DEFAULT_CTX = 8192
_OUTPUTS_PER_SEQUENCE = 16
_MAX_OUTPUTS = 64
_DRAFT_CELLS = 48
_FLASH_AUTO, _FLASH_OFF = -1, 0
# ggml-backend.h: enum ggml_backend_dev_type
_GGML_DEVICE_GPU, _GGML_DEVICE_IGPU = 1, 2
_started = False


def start_native() -> Any:
    """Initialise llama.cpp once per process and return the bindings module."""
    global _started
    import llama_cpp

    log.install()
    if not _started:
        llama_cpp.llama_backend_init()
        _started = True
    return llama_cpp


def usable_cores() -> int:
    """Physical cores this process may run on: more threads than that slow decode down."""
    import psutil

    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(affinity, psutil.cpu_count(logical=False) or affinity))


def fingerprint(path: Path) -> str:
    """Identity of a GGUF file: its size, its first and last MiB, and 64 KiB at 30 places between (hex, 32 digits).

    Hashing 40 GB would take longer than loading it; a file that differs only elsewhere is another quantisation run
    of the same weights with the same header, which no two published files share.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as f:
        digest.update(f.read(2**20))
        for i in range(1, 31):
            f.seek(size * i // 31)
            digest.update(f.read(2**16))
        f.seek(max(0, size - 2**20))
        digest.update(f.read(2**20))
    return digest.hexdigest()[:32]


def kv_meaning(llama: Any, spec: LoadSpec) -> str:
    """What gives exported KV its meaning besides weights and KV types: the bindings, the native libraries that compute
    it, flash attention (V is laid out in another way without) and llama.cpp's rotation of quantised KV, which an
    environment variable turns off (llama-kv-cache.cpp). KV read under another meaning gives garbage, unnoticed."""
    loaded = Path(str(llama.llama_cpp._lib._name))
    libraries = [p for p in sorted(loaded.parent.glob("*")) if p.suffix in (".so", ".dylib", ".dll") and p.is_file()]
    native = " ".join(f"{p.name}:{fingerprint(p)}" for p in libraries or [loaded] if p.is_file())
    rotation = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "")
    return f"llama-cpp-python {llama.__version__}; {native}; flash {spec.flash_attention}; no rotation {rotation}"


def _check_file(path: Path) -> None:
    if not path.exists():
        raise LoadError(f"there is no file {path.name!r} at that path")
    if path.is_dir():
        raise LoadError(f"{path.name!r} is a folder, not a GGUF file")
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise LoadError(f"{path.name!r} can't be read: {e.strerror}") from e
    if magic != b"GGUF":
        raise LoadError(f"{path.name!r} is not a GGUF file (it does not begin with the letters GGUF)")


def _cause(default: str) -> str:
    lines = log.errors()
    useful = [line for line in lines if "failed to load model" not in line and "error loading model" not in line]
    loading = [line.split("error loading model:", 1)[1].strip() for line in lines if "error loading model:" in line]
    return "; ".join(dict.fromkeys((loading or useful)[:2])) or default


def load_model(path: Path, spec: LoadSpec, on_progress: Callable[[float], None] | None) -> Any:
    """The llama_model pointer for `path`; LoadError with llama.cpp's own reason otherwise."""
    llama = start_native()
    _check_file(path)
    params = llama.llama_model_default_params()
    params.n_gpu_layers = spec.n_gpu_layers if spec.n_gpu_layers >= 0 else 999
    params.load_mtp = spec.mtp

    def report(progress: float, _user_data: Any) -> bool:
        if on_progress is not None:
            on_progress(progress)
        return True

    callback = llama.llama_progress_callback(report)
    params.progress_callback = callback
    log.mark()
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        cause = _cause("llama.cpp gave no reason")
        if "unable to allocate" in cause or "failed to allocate" in cause:
            raise OutOfMemoryError(f"not enough memory for the weights of {path.name!r}: {cause}")
        raise LoadError(f"llama.cpp can't load {path.name!r}: {cause}")
    if not llama.llama_model_has_decoder(model) or llama.llama_model_has_encoder(model):
        llama.llama_model_free(model)
        raise LoadError(f"{path.name!r} is not a text-generating (decoder-only) model")
    return model


def vocabulary(path: str) -> list[bytes]:
    """Every token's bytes, control tokens as written. Reads the header only; LoadError when it can't be read."""
    llama = start_native()
    file = Path(path)
    _check_file(file)
    params = llama.llama_model_default_params()
    params.vocab_only = True
    log.mark()
    model = llama.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        raise LoadError(f"llama.cpp can't read the vocabulary of {file.name!r}: {_cause('it gave no reason')}")
    vocab = llama.llama_model_get_vocab(model)
    tokens = [token_piece(llama, vocab, t, special=True) for t in range(llama.llama_vocab_n_tokens(vocab))]
    llama.llama_model_free(model)
    return tokens


def token_piece(llama: Any, vocab: Any, token: int, *, special: bool) -> bytes:
    """The bytes of one token."""
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        if n >= 0:
            return bytes(buffer.raw[:n])
        size = -n


def has_gpu() -> bool:
    """True when this llama.cpp build sees an accelerator here (llama_supports_gpu_offload also counts plain RPC)."""
    from llama_cpp._ggml import libggml

    find = libggml.ggml_backend_dev_by_type
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_int]
    return any(find(kind) for kind in (_GGML_DEVICE_GPU, _GGML_DEVICE_IGPU))


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
    if at_node is not None:
        params.cb_eval = at_node
    log.mark()
    context = llama.llama_init_from_model(model, params)
    if not context:
        cause = _cause("llama.cpp gave no reason")
        if "alloc" in cause:
            raise OutOfMemoryError(f"not enough memory for a context of {params.n_ctx} tokens: {cause}")
        raise LoadError(f"llama.cpp can't make a context of {params.n_ctx} tokens: {cause}")
    return context


def load(spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> LlamaCppBackend:
    """Load a GGUF as a Backend."""
    from localllm_backends.llamacpp import kv_probe, mtp
    from localllm_backends.llamacpp.backend import LlamaCppBackend

    for kind in (spec.kv_type_k, spec.kv_type_v):
        if kind not in GGML_TYPES:
            raise LoadError(f"unknown KV cache type {kind!r}: llama.cpp knows {', '.join(GGML_TYPES)}")
    llama = start_native()
    path = Path(spec.path)
    if spec.mtp:
        _check_file(path)
        reason = mtp.why_not(llama, path)
        if reason is not None:
            raise LoadError(f"{path.name!r} can't draft for itself: {reason}")
    model = load_model(path, spec, on_progress)
    windowed = llama.llama_model_n_swa(model) > 0
    recurrent = llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
    # A spare sequence receives imported segments; models whose memory can't be cut into segments need none.
    spare = 0 if windowed or recurrent else 1
    context = None
    try:
        spec, note = kv_probe.settle(model, spec)
        context = new_context(model, spec, n_seq_max=spec.n_seq_max + spare)
        sizes, heads = log.buffer_sizes(), None
        if spec.mtp:
            second = new_context(model, spec, n_seq_max=spec.n_seq_max + spare, mtp=True)
            sizes = sizes.plus(log.buffer_sizes())
            heads = mtp.MtpHeads(llama, model, context, second)
    except Exception:
        if context is not None:
            llama.llama_free(context)
        llama.llama_model_free(model)
        raise
    backend = LlamaCppBackend(llama, model, context, spec, path, sizes, recurrent=bool(recurrent), heads=heads)
    if note:
        backend.info.metadata[kv_probe.NOTE_KEY] = note
    return backend


def c_string(function: Any, *args: Any, size: int = 2048) -> str | None:
    """Call one of llama.cpp's fill-this-buffer functions; grows the buffer when told it is too small."""
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = function(*args, buffer, size)
        if n < 0:
            return None
        if n < size:
            return buffer.value.decode("utf-8", "replace")
        size = n + 1
