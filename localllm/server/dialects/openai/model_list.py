"""GET /v1/models: friendly ids, the served context and capabilities; never a path."""

from __future__ import annotations

from typing import Any

from localllm.server.models.router import ModelRouter, ServedModel


def entry(model: ServedModel) -> dict[str, Any]:
    """One model, in OpenAI's shape plus what editors look for: `context_length`, `meta.n_ctx`, `architecture`,
    `status`."""
    n_ctx = model.served_n_ctx
    info = model.info
    body: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "localllm",
        "aliases": list(model.aliases),
        "context_length": n_ctx,
        "max_model_len": n_ctx,
        "capabilities": model.capabilities,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "status": {"value": "loaded" if model.loaded else "unloaded"},
        "meta": {"n_ctx": n_ctx},
    }
    if info is not None:
        body["meta"] = {
            "n_ctx": n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_vocab": info.n_vocab,
            "n_params": info.n_params,
            "size": info.weights_bytes,
            "architecture": info.architecture,
        }
    return body


def openai_list(models: ModelRouter) -> dict[str, Any]:
    """The list; Codex reads `models` beside OpenAI's `data`."""
    entries = [entry(m) for m in models.list()]
    return {
        "object": "list",
        "data": entries,
        "models": [{"slug": e["id"], "display_name": e["id"], "context_window": e["context_length"]} for e in entries],
    }
