"""GGUF files: their identity, the meaning of their KV, and loading their weights with llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, LoadSpec, OutOfMemoryError
from localllm_backends.llamacpp import context
from localllm_backends.llamacpp.binding.engine_files import file_identity, libraries_in
from localllm_backends.llamacpp.kv_blocks import KV
from localllm_backends.llamacpp.native import (
    Buffers,
    bindings,
    bindings_version,
    log,
    start_native,
)
from localllm_backends.plain_files import check_plain_file


@cache
def native_libraries() -> str:
    """Return the identity of the libraries that compute."""
    return " ".join(
        f"{path.name}:{file_identity(path)}" for path in libraries_in(bindings().folder)
    )


def kv_layout() -> str:
    """Return how exported KV is laid out, in addition to weights and KV types.

    That is the version of llama.cpp's sequence state, the block format, and llama.cpp's rotation of
    quantised KV, which an environment variable turns off (llama-kv-cache.cpp). KV that is read with
    another layout gives wrong results without an error.
    """
    rotation = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "")
    llama = bindings()
    version = llama.LLAMA_STATE_SEQ_VERSION if llama.has("LLAMA_STATE_SEQ_VERSION") else 0
    return f"llama.cpp sequence {version}; no rotation {rotation}; blocks {KV.decode()}"


def kv_meaning() -> str:
    """Return everything that the bits of exported KV depend on, in addition to weights and KV
    types: the bindings, the native libraries, and the layout."""
    return f"llama-cpp-python {bindings_version()}; {native_libraries()}; {kv_layout()}"


def check_file(path: Path) -> None:
    """Raise LoadError, with the reason, unless `path` is a readable file that starts with GGUF's
    magic."""
    if not path.exists():
        raise LoadError(f"there is no file {path.name!r} at that path")
    check_plain_file(path)
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise LoadError(f"{path.name!r} can't be read: {e.strerror}") from e
    if magic != b"GGUF":
        raise LoadError(f"{path.name!r} is not a GGUF file (it does not start with the bytes GGUF)")


def open_file(path: Path, params: Any, on_progress: Callable[[float], None] | None = None) -> Any:
    """Return the llama_model pointer for `path`.

    Raises LoadError or OutOfMemoryError with llama.cpp's reason.
    """
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
        raise LoadError(f"llama.cpp can't load {path.name!r}: {why}", load_hint(why))
    return model


def load_model(
    path: Path,
    spec: LoadSpec,
    on_progress: Callable[[float], None] | None,
    *,
    drafter: bool = False,
) -> tuple[Any, Buffers]:
    """Load the model in `path`; returns it and the buffers of its weights.

    Raises LoadError, also if the model does not generate text, unless it is a `drafter`.
    """
    llama = start_native()
    params = context.model_params(llama, spec)
    llama.set_fields(params, load_mtp=spec.mtp and not drafter)
    model = open_file(path, params, on_progress)
    decoder_only = llama.llama_model_has_decoder(model) and not llama.llama_model_has_encoder(model)
    if not drafter and not decoder_only:
        llama.llama_model_free(model)
        raise LoadError(
            f"{path.name!r} is not a text-generating (decoder-only) model",
            "use a model that generates text; serve embedding models and rerankers by their name",
        )
    buffers = log.buffers()
    if any(not place.endswith("_Mapped") for place, _ in buffers):
        context.release_pages(path)
    return model, buffers


# llama.cpp's messages for truncated or damaged files (src/llama-model-loader.cpp,
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


def load_hint(reason: str) -> str:
    """Return the remedy for a load error in llama.cpp's words; "" if the file is damaged."""
    if any(sign in reason for sign in _DAMAGED):
        return ""
    if "unknown model architecture" in reason:
        return (
            "a newer llama.cpp may support it (`localllm setup`); if the file comes from "
            "Ollama's store, download a GGUF file of the model from the hub"
        )
    return (
        "this llama.cpp does not support the file's layout, which some of Ollama's "
        "files have: download a GGUF file of the model from the hub, or get a newer "
        "llama.cpp (`localllm setup`)"
    )
