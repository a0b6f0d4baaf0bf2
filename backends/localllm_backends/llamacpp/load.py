"""From a LoadSpec to a loaded llama.cpp model and context, or one sentence saying why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from localllm_backends.contract import DRAFTER_LEFT_OUT, KV_FALLBACK, LoadError, LoadSpec
from localllm_backends.llamacpp import companion, kv_probe, mtp, rpc, vision
from localllm_backends.llamacpp.backend import LlamaCppBackend
from localllm_backends.llamacpp.context import new_context, served_context
from localllm_backends.llamacpp.devices import check_kv
from localllm_backends.llamacpp.heads import DraftHeads
from localllm_backends.llamacpp.native import GGML_TYPES, log, start_native
from localllm_backends.llamacpp.weights import check_file, load_model


def load(spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> LlamaCppBackend:
    for kind in (spec.kv_type_k, spec.kv_type_v):
        if kind not in GGML_TYPES:
            raise LoadError(f"unknown KV cache type {kind!r}", f"llama.cpp knows {', '.join(GGML_TYPES)}")
    llama = start_native()
    rpc.connect(spec.placement.workers)
    path = Path(spec.path)
    spec, left_out = _drafting(llama, spec, path)
    drafts = spec.mtp or bool(spec.drafter)
    model, weights = load_model(path, spec, on_progress)
    windowed = llama.llama_model_n_swa(model) > 0
    recurrent = llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
    # A spare sequence receives imported segments. It has a window and a recurrent state like every other. A model that is
    # nothing but state has no segments, and draft heads keep the state from being had apart.
    alone = recurrent and not llama.llama_model_is_hybrid(model)
    spare = 0 if alone or ((windowed or recurrent) and drafts) else 1
    context = projector = None
    try:
        spec, note = kv_probe.settle(model, spec)
        check_kv(llama, model, spec, served_context(model, spec))
        context = new_context(model, spec, n_seq_max=spec.n_seq_max + spare)
        sizes = weights.plus(log.buffer_sizes())
        heads: DraftHeads | None = None
        if spec.mtp:
            second = new_context(model, spec, n_seq_max=spec.n_seq_max + spare, mtp=True)
            sizes = sizes.plus(log.buffer_sizes())
            heads = mtp.MtpHeads(llama, model, context, second)
        elif spec.drafter:
            try:
                heads, more = companion.open_drafter(llama, model, context, spec, spec.n_seq_max + spare)
                sizes = sizes.plus(more).plus(log.buffer_sizes())
            except LoadError as e:
                if not spec.drafter_optional:
                    raise
                left_out, spec = str(e), replace(spec, drafter="")
        if spec.projector:
            projector = vision.open_projector(llama, model, spec)
    except Exception:
        if context is not None:
            llama.llama_free(context)
        llama.llama_model_free(model)
        raise
    make: Any = LlamaCppBackend if projector is None else partial(vision.LlamaCppVisionBackend, projector=projector)
    backend: LlamaCppBackend = make(llama, model, context, spec, path, sizes, recurrent=bool(recurrent), heads=heads)
    if note:
        backend.info.metadata[KV_FALLBACK] = note
    if left_out:
        backend.info.metadata[DRAFTER_LEFT_OUT] = f"what would draft for the model is left out: {left_out}"
    return backend


def _drafting(llama: Any, spec: LoadSpec, path: Path) -> tuple[LoadSpec, str]:
    """`spec` with what can draft, as far as files' headers say, and why the model's own heads can't. Raises LoadError."""
    if spec.mtp:
        check_file(path)
    reason = mtp.why_not(llama, path) if spec.mtp else None
    if reason is None:
        return spec, ""
    left_out = f"{path.name!r} can't draft for itself: {reason}"
    if not spec.drafter_optional:
        raise LoadError(left_out, "load it with `--draft off`")
    return replace(spec, mtp=False), left_out
