"""LM Studio's own paths: its list of models in both forms, and loading and unloading."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from localllm.server.dialects.fields import Body, read
from localllm.server.dialects.lmstudio.model_list import entry_v0, entry_v1, kind
from localllm.server.dialects.openapi import body_of
from localllm.server.http.headers import ignored_header
from localllm.server.http.json_body import read_json
from localllm.server.serving import Server


class LoadFields(Body):
    """POST /api/v1/models/load. How a model is loaded is not a request's to say: what it sends of that is named as
    ignored."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    echo_load_config: bool = False


class UnloadFields(Body):
    """POST /api/v1/models/unload."""

    instance_id: Annotated[str, Field(min_length=1, max_length=512)]


def routes(server: Server) -> APIRouter:
    """The routes, bound to `server`."""
    router = APIRouter(tags=["LM Studio"])

    @router.get("/api/v0/models")
    async def list_v0() -> dict[str, Any]:
        """The models, in the older form."""
        return {"object": "list", "data": [entry_v0(m) for m in server.models.list()]}

    @router.get("/api/v0/models/{model_id:path}")
    async def one_v0(model_id: str) -> dict[str, Any]:
        """One model, in the older form."""
        return entry_v0(server.models.resolve(model_id))

    @router.get("/api/v1/models")
    async def list_v1() -> dict[str, Any]:
        """The models, each with its loaded instance."""
        return {"models": [entry_v1(m) for m in server.models.list()]}

    @router.post("/api/v1/models/load", response_model=None, openapi_extra=body_of(LoadFields, "instance_id", "status"))
    async def load(request: Request) -> Response:
        """Load a model; answers when it is loaded."""
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
        fields, ignored = read(UnloadFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.instance_id)
        await model.unload()
        return JSONResponse({"instance_id": model.name}, headers=ignored_header(ignored))

    return router
