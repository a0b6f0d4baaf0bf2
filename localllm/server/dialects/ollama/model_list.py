"""The models on offer as Ollama lists them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from localllm.server.models.router import ServedModel


def model_details(model: ServedModel) -> dict[str, Any]:
    """`details` of a model list."""
    info = model.info
    return {
        "parent_model": "",
        "format": str(model.details.get("format", "gguf")),
        "family": info.architecture if info else str(model.details.get("architecture", "")),
        "families": [info.architecture] if info else [],
        "parameter_size": f"{info.n_params / 1e9:.1f}B" if info else "",
        "quantization_level": str(model.details.get("quant", "")),
    }


def tag(model: ServedModel) -> dict[str, Any]:
    """One entry of /api/tags."""
    info = model.info
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.fromtimestamp(model.created_s, UTC).isoformat().replace("+00:00", "Z"),
        "size": info.weights_bytes if info else int(model.details.get("bytes", 0)),
        "digest": info.fingerprint if info else "",
        "details": model_details(model),
    }


def running(model: ServedModel) -> dict[str, Any]:
    """One entry of /api/ps."""
    more = {"expires_at": "0001-01-01T00:00:00Z", "size_vram": 0, "context_length": model.served_n_ctx}
    return {**tag(model), **more}


def show(model: ServedModel, template: str) -> dict[str, Any]:
    """/api/show. `template` mentions `.Suffix` only where the model can fill in (Continue looks for it)."""
    info = model.info
    architecture = info.architecture if info else "unknown"
    capabilities = model.capabilities
    if "insert" in capabilities:
        template += "{{/* .Suffix */}}"
    return {
        "modelfile": "",
        "parameters": f"num_ctx {model.served_n_ctx}" if model.served_n_ctx else "",
        "template": template,
        "details": model_details(model),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": model.name,
            "general.parameter_count": info.n_params if info else None,
            f"{architecture}.context_length": model.served_n_ctx,
        },
        "capabilities": capabilities,
        "modified_at": tag(model)["modified_at"],
    }
