"""The models on offer as LM Studio lists them, in both forms.

Its shapes: https://lmstudio.ai/docs/developer/rest (v1) and …/rest/endpoints (v0).
"""

from __future__ import annotations

from typing import Any

from localllm.server.models.served import ServedModel


def kind(model: ServedModel) -> str:
    """What it is, in the newer form's words, which know two kinds."""
    return "embedding" if model.embeds else "llm"


def entry_v0(model: ServedModel) -> dict[str, Any]:
    """One entry of the older list."""
    body = {
        "id": model.name,
        "object": "model",
        "type": "embeddings" if model.embeds else "llm",
        "publisher": "localllm",
        "arch": _architecture(model),
        "compatibility_type": str(model.details.get("format", "gguf")),
        "quantization": str(model.details.get("quant", "")),
        "state": "loaded" if model.loaded else "not-loaded",
        "max_context_length": model.served_n_ctx,
        "capabilities": ["tool_use"] if _uses_tools(model) else [],
    }
    return {**body, "loaded_context_length": model.served_n_ctx} if model.loaded else body


def entry_v1(model: ServedModel) -> dict[str, Any]:
    """One entry of the newer list."""
    info, details = model.info, model.details
    size_bytes = info.weights_bytes if info else int(details.get("bytes", 0))
    bits = round(8 * info.weights_bytes / info.n_params, 2) if info and info.n_params else None
    quant = str(details.get("quant", ""))
    body: dict[str, Any] = {
        "type": kind(model),
        "publisher": "localllm",
        "key": model.name,
        "display_name": model.name,
        "quantization": {"name": quant or None, "bits_per_weight": bits},
        "size_bytes": size_bytes,
        "params_string": _parameters(info.n_params) if info else None,
        "loaded_instances": [
            {"id": model.name, "config": {"context_length": model.served_n_ctx}},
        ]
        if model.loaded
        else [],
        "max_context_length": model.served_n_ctx or 0,
        "format": str(details.get("format", "gguf")),
    }
    if model.embeds:
        return body
    capable = {"vision": "vision" in model.capabilities, "trained_for_tool_use": _uses_tools(model)}
    return {**body, "architecture": _architecture(model) or None, "capabilities": capable, "description": None}


def _architecture(model: ServedModel) -> str:
    return model.info.architecture if model.info else str(model.details.get("architecture", ""))


def _uses_tools(model: ServedModel) -> bool:
    return "tools" in model.capabilities


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
