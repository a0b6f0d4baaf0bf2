"""The paths of llama.cpp's server, and LM Studio's model list."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from localllm.conversation.messages import normalise
from localllm.engine.messages import Generation
from localllm.errors import RequestError
from localllm.server.dialects.fields import read
from localllm.server.dialects.llamacpp import completion, model_list
from localllm.server.dialects.llamacpp.completion import InfillFields, LlamaCppFields
from localllm.server.dialects.llamacpp.vocabulary import DetokenizeFields, TemplateFields, TokenizeFields
from localllm.server.dialects.openapi import body_of
from localllm.server.dialects.route import Route, mount
from localllm.server.dialects.wire import EVENTS
from localllm.server.generation.conversing import Ask
from localllm.server.generation.prompting import Wishes
from localllm.server.http.json_body import read_json
from localllm.server.serving import Server

COMPLETION = Route("/completion", LlamaCppFields, completion.order, EVENTS, "Continue raw text", hints=completion.HINTS)
INFILL = Route(
    "/infill",
    InfillFields,
    completion.order,
    EVENTS,
    "Fill in between a prefix and a suffix, with other files as context",
    hints=completion.HINTS,
)


def routes(server: Server) -> APIRouter:
    """The routes, bound to `server`."""
    router = APIRouter(tags=["llama.cpp"])
    mount(router, server, COMPLETION, INFILL)
    _vocabulary(router, server)

    @router.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        """Facts of a model; never loads it."""
        return model_list.props(server.models.resolve(model))

    @router.get("/models/sse", response_model=None, include_in_schema=False)
    async def model_events() -> Response:
        """Zed's subscription to loading and unloading."""
        return StreamingResponse(model_list.changes(server.models), media_type="text/event-stream")

    @router.get("/api/v0/models", tags=["LM Studio"])
    async def lm_studio() -> dict[str, Any]:
        """LM Studio's model list."""
        return {"object": "list", "data": [model_list.lm_studio(m) for m in server.models.list()]}

    @router.get("/api/v0/models/{model_id:path}", tags=["LM Studio"])
    async def lm_studio_one(model_id: str) -> dict[str, Any]:
        """One entry of LM Studio's list."""
        return model_list.lm_studio(server.models.resolve(model_id))

    return router


def _vocabulary(router: APIRouter, server: Server) -> None:
    @router.post("/tokenize", response_model=None, openapi_extra=body_of(TokenizeFields, "tokens"))
    async def tokenize(request: Request) -> dict[str, Any]:
        """Token ids of a text."""
        fields, _ = read(TokenizeFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        with model.lease():
            engine = await model.engine()
            tokens = await engine.tokenize(fields.content, special=fields.parse_special, add_bos=fields.add_special)
            if not fields.with_pieces:
                return {"tokens": tokens}
            return {"tokens": [{"id": t, "piece": await engine.detokenize([t])} for t in tokens]}

    @router.post("/detokenize", response_model=None, openapi_extra=body_of(DetokenizeFields, "content"))
    async def detokenize(request: Request) -> dict[str, Any]:
        """Text of token ids."""
        fields, _ = read(DetokenizeFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        with model.lease():
            engine = await model.engine()
            bad = next((t for t in fields.tokens if t >= engine.info.n_vocab), None)
            if bad is not None:
                raise RequestError(f"token {bad} is outside the vocabulary", param="tokens")
            return {"content": await engine.detokenize(fields.tokens)}

    @router.post("/apply-template", response_model=None, openapi_extra=body_of(TemplateFields, "prompt"))
    async def apply_template(request: Request) -> dict[str, Any]:
        """The prompt a conversation becomes."""
        fields, _ = read(TemplateFields, await read_json(request, server.settings))
        model = server.models.resolve(fields.model)
        wishes = Wishes(template_kwargs=fields.chat_template_kwargs)
        ask = Ask(normalise(fields.messages), Generation(model.sampling), wishes)
        with model.lease():
            job = await server.job(ask, model, await model.engine())
        return {"prompt": job.prompt}
