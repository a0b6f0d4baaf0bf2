"""LM Studio's own API: both versions of its model list, loading and unloading."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from localllm.server.dialects.fields import RequestBody, read
from localllm.server.dialects.openapi import body_of
from localllm.server.http.accounts import admins_only
from localllm.server.http.asgi import ignored_header
from localllm.server.http.json_body import read_json
from localllm.server.models.served import ServedModel
from localllm.server.serving import Server


def kind(model: ServedModel) -> str:
    """Its type in v1, which has only these two."""
    return "embedding" if model.embeds else "llm"


def entry_v0(model: ServedModel) -> dict[str, Any]:
    """One entry of the v0 list."""
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
    """One entry of the v1 list."""
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


class LoadFields(RequestBody):
    """POST /api/v1/models/load. Load parameters are named as ignored: a request can't change how a model is loaded."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    echo_load_config: bool = False


class UnloadFields(RequestBody):
    """POST /api/v1/models/unload."""

    instance_id: Annotated[str, Field(min_length=1, max_length=512)]


def routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["LM Studio"])

    @router.get("/api/v0/models")
    async def list_v0() -> dict[str, Any]:
        """The models, in the v0 form."""
        return {"object": "list", "data": [entry_v0(m) for m in server.models.list()]}

    @router.get("/api/v0/models/{model_id:path}")
    async def one_v0(model_id: str) -> dict[str, Any]:
        """One model, in the v0 form."""
        return entry_v0(server.models.resolve(model_id))

    @router.get("/api/v1/models")
    async def list_v1() -> dict[str, Any]:
        """The models, each with its loaded instance."""
        return {"models": [entry_v1(m) for m in server.models.list()]}

    @router.post("/api/v1/models/load", response_model=None, openapi_extra=body_of(LoadFields, "instance_id", "status"))
    async def load(request: Request) -> Response:
        """Load a model; answers when it is loaded."""
        admins_only("loading a model")
        fields, ignored = read(LoadFields, await read_json(request, server.settings))
        model = await server.models.find(fields.model)
        began_s = time.monotonic()
        await model.engine()
        body = {
            "type": kind(model),
            "instance_id": model.name,
            "load_time_seconds": round(time.monotonic() - began_s, 3),
            "status": "loaded",
            **({"load_config": {"context_length": model.served_n_ctx}} if fields.echo_load_config else {}),
        }
        return JSONResponse(body, headers=ignored_header(ignored))

    @router.post("/api/v1/models/unload", response_model=None, openapi_extra=body_of(UnloadFields, "instance_id"))
    async def unload(request: Request) -> Response:
        """Give a model's memory back. A 503 while it answers requests."""
        admins_only("unloading a model")
        fields, ignored = read(UnloadFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.instance_id)
        await model.unload()
        return JSONResponse({"instance_id": model.name}, headers=ignored_header(ignored))

    return router
