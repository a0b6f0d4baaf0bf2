"""Model facts for llama.cpp's clients: /props, /slots, and the event stream of loading and unloading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from localllm.conversation.tools import format_for, has_unknown_notation
from localllm.server.http.accounts import caller
from localllm.server.models.router import ModelRouter, ServedModel

_LOOK_S, _KEEPALIVE_S = 0.5, 10.0


def props(served: ServedModel) -> dict[str, Any]:
    """A model's GET /props."""
    info = served.info
    template = (info.chat_template or "") if info else ""
    return {
        "default_generation_settings": {"n_ctx": served.served_n_ctx, "params": asdict(served.sampling)},
        "total_slots": info.n_seq_max if info else 1,
        "model_alias": served.name,
        "model_path": served.name,
        "modalities": {"vision": bool(info and info.vision), "audio": False},
        "chat_template": template,
        "chat_template_caps": {
            "supports_tools": not has_unknown_notation(template),
            "supports_tool_calls": not has_unknown_notation(template),
            "supports_system_role": True,
            "supports_parallel_tool_calls": True,
            "native_format": format_for(template).name if info and not has_unknown_notation(template) else None,
        },
        "bos_token": info.bos_text if info else "",
        "eos_token": info.eos_text if info else "",
        "build_info": "localllm",
        "is_sleeping": False,
    }


async def changes(models: ModelRouter) -> AsyncIterator[bytes]:
    """Events of loading and unloading: the current state, then each change, with load progress."""
    sent: dict[str, dict[str, Any]] = {}
    quiet_s = 0.0
    while True:
        for m in models.list():
            status = _status(m)
            if sent.get(m.name) != status:
                sent[m.name], quiet_s = status, 0.0
                event = {"model": m.name, "event": "model_status", "data": status}
                yield f"data: {json.dumps(event)}\n\n".encode()
        await asyncio.sleep(_LOOK_S)
        quiet_s += _LOOK_S
        if quiet_s >= _KEEPALIVE_S:
            quiet_s = 0.0
            yield b": keepalive\n"


def _status(model: ServedModel) -> dict[str, Any]:
    if model.state == "loading":
        value = round(model.worker.progress, 2)
        return {"status": "loading", "progress": {"stages": ["text_model"], "current": "text_model", "value": value}}
    return {"status": "loaded" if model.loaded else "unloaded"}


async def slots(model: ServedModel) -> list[dict[str, Any]]:
    """GET /slots: one entry per slot with its running request, then the waiting requests; no prompt text, and of requests of
    others only that they are there."""
    info = model.info
    if not model.loaded or info is None:
        return []
    jobs: list[dict[str, Any]] = (await model.worker.snapshot()).get("jobs", [])
    running = [j for j in jobs if j["state"] != "waiting"]
    waiting = [j for j in jobs if j["state"] == "waiting"]
    free = max(0, info.n_seq_max - len(running))
    entries = [*running, *[None] * free, *waiting]
    account = caller()
    return [
        _slot(i, info.n_ctx, job, known=account.admin or (job is not None and job["tenant"] == account.name))
        for i, job in enumerate(entries)
    ]


def _slot(number: int, n_ctx: int, job: dict[str, Any] | None, *, known: bool) -> dict[str, Any]:
    base = {"id": number, "n_ctx": n_ctx, "speculative": True, "is_processing": job is not None}
    if job is None:
        return {**base, "state": "idle"}
    if not known:
        return {**base, "state": "busy"}
    return {
        **base,
        "state": job["state"],
        "id_task": job["number"],
        "n_prompt_tokens": job["prompt_tokens"],
        "n_prompt_tokens_processed": job["processed_tokens"],
        "n_prompt_tokens_cache": job["cached_tokens"],
        "params": {**job["sampling"], "n_predict": job["max_tokens"], "max_tokens": job["max_tokens"]},
        "next_token": [
            {
                "has_next_token": True,
                "has_new_line": False,
                "n_remain": job["max_tokens"] - job["generated_tokens"],
                "n_decoded": job["generated_tokens"],
            }
        ],
    }
