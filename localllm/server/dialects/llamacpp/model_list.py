"""What is known of the models, for llama.cpp's and LM Studio's clients: props, loading and unloading, lists."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from localllm.conversation.tools import format_for, unread
from localllm.server.models.router import ModelRouter, ServedModel

_SSE_PERIOD_S = 10.0


def props(served: ServedModel) -> dict[str, Any]:
    """Facts of a model as GET /props tells them."""
    info = served.info
    template = (info.chat_template or "") if info else ""
    return {
        "default_generation_settings": {"n_ctx": served.served_n_ctx, "params": asdict(served.sampling)},
        "total_slots": info.n_seq_max if info else 1,
        "model_alias": served.name,
        "model_path": served.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": template,
        "chat_template_caps": {
            "supports_tools": not unread(template),
            "supports_tool_calls": not unread(template),
            "supports_system_role": True,
            "supports_parallel_tool_calls": True,
            "native_format": format_for(template).name if info and not unread(template) else None,
        },
        "bos_token": info.bos_text if info else "",
        "eos_token": info.eos_text if info else "",
        "build_info": "localllm",
        "is_sleeping": False,
    }


async def changes(models: ModelRouter) -> AsyncIterator[bytes]:
    """Events of loading and unloading: the state now, then each change."""
    said: dict[str, str] = {}
    while True:
        for m in models.list():
            status = "loaded" if m.loaded else "unloaded"
            if said.get(m.name) != status:
                said[m.name] = status
                event = {"model": m.name, "event": "status", "data": {"status": status}}
                yield f"data: {json.dumps(event)}\n\n".encode()
        await asyncio.sleep(_SSE_PERIOD_S)
        yield b": keepalive\n\n"


def lm_studio(model: ServedModel) -> dict[str, Any]:
    """One entry of LM Studio's list."""
    info = model.info
    return {
        "id": model.name,
        "object": "model",
        "type": "embeddings" if model.embeds else "llm",
        "publisher": "localllm",
        "arch": info.architecture if info else "",
        "compatibility_type": str(model.details.get("format", "gguf")),
        "quantization": str(model.details.get("quant", "")),
        "state": "loaded" if model.loaded else "not-loaded",
        "max_context_length": model.served_n_ctx,
        "loaded_context_length": model.served_n_ctx,
        "capabilities": [] if model.embeds else ["tool_use"],
    }
