"""Load a llama.cpp model and its context from a LoadSpec, or raise an error with the reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, LoadSpec
from localllm_backends.llamacpp import kv_probe, media, mtp, rpc, trained_drafter
from localllm_backends.llamacpp.adapters import with_adapters
from localllm_backends.llamacpp.backend import LlamaCppBackend
from localllm_backends.llamacpp.context import new_context, served_context
from localllm_backends.llamacpp.devices import check_kv
from localllm_backends.llamacpp.heads import DraftHeads
from localllm_backends.llamacpp.native import Buffers, log, start_native
from localllm_backends.llamacpp.weights import load_model


def load(spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> LlamaCppBackend:
    llama = start_native()
    rpc.connect(spec.placement.workers)
    path = Path(spec.path)
    missing_drafter = ""
    if spec.mtp:
        try:
            mtp.check_heads(path)
        except LoadError as e:
            if not spec.drafter_optional:
                raise
            missing_drafter = str(e)
            spec = replace(spec, mtp=False)
    model, buffers = load_model(path, spec, on_progress)
    with ExitStack() as freed:
        freed.callback(llama.llama_model_free, model)
        spec = with_adapters(model, spec)
        buffers += log.buffers()
        spec, note = kv_probe.choose(model, spec)
        check_kv(llama, model, spec, served_context(model, spec))
        n_seq_max = spec.n_seq_max + _n_spare(llama, model, spec)
        context = new_context(model, spec, n_seq_max=n_seq_max)
        freed.callback(llama.llama_free, context)
        buffers += log.buffers()
        try:
            heads, more = _open_heads(llama, model, context, spec, n_seq_max)
        except LoadError as e:
            if spec.mtp or not spec.drafter_optional:
                raise
            missing_drafter = str(e)
            spec = replace(spec, drafter="")
            heads = None
            more = Buffers()
        buffers += more
        if heads is not None:
            freed.callback(heads.free)
        backend_class = media.LlamaCppMediaBackend if spec.projector else LlamaCppBackend
        backend = backend_class(llama, model, context, spec, path, buffers, heads)
        freed.pop_all()
    notes = [note] if note else []
    if missing_drafter:
        notes.append(f"the model runs without its drafter: {missing_drafter}")
    backend.info = replace(backend.info, load_notes=tuple(notes))
    return backend


def _n_spare(llama: Any, model: Any, spec: LoadSpec) -> int:
    """Return the number of spare sequences (0 or 1). A spare sequence receives imported segments.

    It has a window and a recurrent state like every other sequence. A purely recurrent model has no
    segments, and with draft heads states can't be exported separately. Then there is no spare
    sequence.
    """
    recurrent = llama.llama_model_is_recurrent(model)
    hybrid = llama.llama_model_is_hybrid(model)
    states = llama.llama_model_n_swa(model) > 0 or recurrent or hybrid
    drafts = spec.mtp or bool(spec.drafter)
    if (recurrent and not hybrid) or (states and drafts):
        return 0
    return 1


def _open_heads(
    llama: Any, model: Any, context: Any, spec: LoadSpec, n_seq_max: int
) -> tuple[DraftHeads | None, Buffers]:
    """Open the draft heads for the model of `context`, if there are any. Raises LoadError.

    Returns the heads and their buffers.
    """
    if spec.mtp:
        second = new_context(model, spec, n_seq_max=n_seq_max, mtp=True)
        return mtp.MtpHeads(llama, context, second), log.buffers()
    if not spec.drafter:
        return None, Buffers()
    heads, weights = trained_drafter.open_drafter(
        llama, model, context, replace(spec, adapters=()), n_seq_max
    )
    return heads, weights + log.buffers()
