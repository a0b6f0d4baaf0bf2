"""LoRA adapters on llama.cpp: loaded once for a model, and applied to contexts with any scales."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, LoadSpec, LoraAdapter
from localllm_backends.llamacpp.native import log, start_native


@dataclass(frozen=True, slots=True)
class LoadedAdapter(LoraAdapter):
    """A loaded adapter. `pointer` is its llama_adapter_lora, which is freed with the model."""

    pointer: Any = None


def with_adapters(model: Any, spec: LoadSpec) -> LoadSpec:
    """Return `spec` with its adapters loaded for `model`. Raises LoadError.

    Call this before creating contexts, because each context reserves a graph with space for the
    adapters.
    """
    log.mark()
    loaded = []
    missing = start_native().missing("adapters") if spec.adapters else ""
    if missing:
        raise LoadError(f"this llama.cpp has no adapters: {missing}", "localllm setup")
    for adapter in spec.adapters:
        pointer = start_native().llama_adapter_lora_init(model, os.fsencode(adapter.path))
        if not pointer:
            name = Path(adapter.path).name
            why = log.reason()
            raise LoadError(f"{name!r} is not a LoRA adapter for this model: {why}")
        loaded.append(LoadedAdapter(adapter.path, adapter.scale, adapter.n_bytes, pointer))
    return replace(spec, adapters=tuple(loaded))


def with_scales(spec: LoadSpec, scales: Sequence[float]) -> LoadSpec:
    """Return `spec` with these scales of its loaded adapters."""
    pairs = zip(spec.adapters, scales, strict=True)
    return replace(spec, adapters=tuple(replace(adapter, scale=s) for adapter, s in pairs))


def apply_adapters(context: Any, adapters: Iterable[LoraAdapter]) -> None:
    """Compute the next steps of `context` with these loaded adapters.

    If they differ from those of the last step, llama.cpp reserves its compute graphs again in the
    next step.
    """
    llama = start_native()
    loaded = [adapter for adapter in adapters if isinstance(adapter, LoadedAdapter)]
    if not loaded:
        return
    pointers = ctypes.c_void_p * len(loaded)
    scales = ctypes.c_float * len(loaded)
    llama.llama_set_adapters_lora(
        context,
        pointers(*(adapter.pointer for adapter in loaded)),
        len(loaded),
        scales(*(adapter.scale for adapter in loaded)),
    )
