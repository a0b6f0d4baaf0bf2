"""GGUF files: what identifies one, what its KV means, its weights and its vocabulary as llama.cpp
reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, LoadSpec, OutOfMemoryError
from localllm_backends.fingerprints import fingerprint
from localllm_backends.llamacpp import context
from localllm_backends.llamacpp.kv_blocks import KV
from localllm_backends.llamacpp.native import (
    Buffers,
    bindings,
    bindings_version,
    log,
    start_native,
)


@cache
def native_libraries() -> str:
    """What identifies the libraries that compute."""
    loaded = Path(str(bindings()._lib._name))
    libraries = []
    for path in sorted(loaded.parent.glob("*")):
        if path.suffix in (".so", ".dylib", ".dll") and path.is_file():
            libraries.append(path)
    if not libraries and loaded.is_file():
        libraries.append(loaded)
    return " ".join(f"{path.name}:{fingerprint(path)}" for path in libraries)


def kv_meaning() -> str:
    """What gives exported KV its meaning besides weights and KV types: the bindings, the native
    libraries that compute it, how blocks of it begin, and llama.cpp's rotation of quantised KV,
    which an environment variable turns off (llama-kv-cache.cpp). KV read under another meaning
    gives garbage, unnoticed."""
    rotation = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "")
    return (
        f"llama-cpp-python {bindings_version()}; {native_libraries()}; no rotation {rotation}; "
        f"blocks {KV.decode()}"
    )


def check_file(path: Path) -> None:
    """LoadError, saying why, unless `path` is a readable file that begins as a GGUF does."""
    if not path.exists():
        raise LoadError(f"there is no file {path.name!r} at that path")
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise LoadError(f"{path.name!r} can't be read: {e.strerror}") from e
    if magic != b"GGUF":
        raise LoadError(
            f"{path.name!r} is not a GGUF file (it does not begin with the letters GGUF)"
        )


def open_file(path: Path, params: Any, on_progress: Callable[[float], None] | None = None) -> Any:
    """The llama_model pointer for `path`; LoadError or OutOfMemoryError with llama.cpp's own reason
    otherwise."""
    llama = start_native()
    check_file(path)

    def report(progress: float, _user_data: Any) -> bool:
        if on_progress is not None:
            on_progress(progress)
        return True

    callback = llama.llama_progress_callback(report)
    params.progress_callback = callback
    log.mark()
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        why = log.reason()
        if "unable to allocate" in why or "failed to allocate" in why:
            raise OutOfMemoryError(f"not enough memory for the weights of {path.name!r}: {why}")
        raise LoadError(f"llama.cpp can't load {path.name!r}: {why}", what_to_do(why))
    return model


def load_model(
    path: Path,
    spec: LoadSpec,
    on_progress: Callable[[float], None] | None,
    *,
    drafter: bool = False,
) -> tuple[Any, Buffers]:
    """The model in `path` and the buffers its weights are in; LoadError, also for one that makes no
    text. A `drafter` makes none by itself."""
    llama = start_native()
    params = context.model_params(llama, spec)
    params.load_mtp = spec.mtp and not drafter
    model = open_file(path, params, on_progress)
    decoder_only = llama.llama_model_has_decoder(model) and not llama.llama_model_has_encoder(model)
    if not drafter and not decoder_only:
        llama.llama_model_free(model)
        raise LoadError(
            f"{path.name!r} is not a text-generating (decoder-only) model",
            "name a model that makes text; "
            "models of embeddings and rerankers are served by their name",
        )
    buffers = log.buffers()
    if any(not place.endswith("_Mapped") for place, _ in buffers):
        context.release_pages(path)
    return model, buffers


# What llama.cpp says of files that are cut short or spoilt (src/llama-model-loader.cpp,
# ggml/src/gguf.cpp).
_DAMAGED = (
    "file bounds",
    "corrupted",
    "incomplete",
    "failed to read",
    "invalid magic",
    "invalid data",
    "gave no reason",
)


def what_to_do(why: str) -> str:
    """The way out of a refusal in llama.cpp's words; "" where the file is damaged, whose way out
    goes without saying."""
    if any(sign in why for sign in _DAMAGED):
        return ""
    if "unknown model architecture" in why:
        return (
            "a newer llama.cpp may know it (`localllm setup`); "
            "a file from Ollama's store may call it otherwise: "
            "fetch a GGUF file of the model from the hub"
        )
    return (
        "the file is laid out otherwise than this llama.cpp reads it, "
        "as some of Ollama's own are: fetch a GGUF file of the model from the hub, "
        "or get a newer llama.cpp (`localllm setup`)"
    )
