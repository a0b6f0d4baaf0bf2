"""Routes of OpenAI's API, and of others that take the same bodies (Mistral's FIM, llama.cpp's /apply-template)."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from localllm.engine.messages import MAX_TOKENS
from localllm.server.dialects import vectors
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.openai import chat, completions, model_list
from localllm.server.dialects.openai.chat import ChatFields
from localllm.server.dialects.openai.completions import CompletionFields
from localllm.server.dialects.route import Route, mount, mount_prompt
from localllm.server.dialects.vectors import MOST_INPUTS, EmbeddingRequest, Texts, cut, numbers
from localllm.server.dialects.wire import EVENTS
from localllm.server.models.router import ServedModel
from localllm.server.serving import Server

_Token = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class EmbeddingFields(RequestBody):
    """POST /v1/embeddings."""

    input: (
        str
        | Texts
        | Annotated[list[_Token], Field(min_length=1)]
        | Annotated[list[Annotated[list[_Token], Field(min_length=1)]], Field(min_length=1, max_length=MOST_INPUTS)]
    ) = Field(description="a text, texts, token ids, or lists of token ids")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS, description="the first so many numbers, made length 1")


def _translate_embedding(fields: EmbeddingFields, model: ServedModel) -> EmbeddingRequest:

    def body(rows: list[bytes], tokens: int) -> dict[str, Any]:
        data = []
        for i, row in enumerate(rows):
            shaped = cut(row, fields.dimensions)
            as_text = fields.encoding_format == "base64"
            vector = base64.b64encode(shaped).decode() if as_text else numbers(shaped)
            data.append({"object": "embedding", "index": i, "embedding": vector})
        return {
            "object": "list",
            "model": model.name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    sent: Any = fields.input
    alone = isinstance(sent, str) or isinstance(sent[0], int)
    return EmbeddingRequest([sent] if alone else list(sent), body)


_KEYS = ("id", "choices", "usage")
CHAT = Route(
    "/v1/chat/completions",
    ChatFields,
    chat.translate,
    EVENTS,
    "Answer a conversation, whole or as server-sent events",
    _KEYS,
    aliases=("/chat/completions",),
)
COMPLETIONS = Route(
    "/v1/completions",
    CompletionFields,
    completions.translate,
    EVENTS,
    "Continue raw text, or fill in between a prompt and a suffix",
    _KEYS,
    aliases=("/completions",),
)
FILL_IN = Route(
    "/v1/fim/completions",
    CompletionFields,
    completions.translate_fill_in,
    EVENTS,
    "Fill in between a prompt and a suffix, answered in the shape of a chat",
    _KEYS,
    aliases=("/fim/completions",),
)
EMBEDDINGS = Route(
    "/v1/embeddings",
    EmbeddingFields,
    _translate_embedding,
    EVENTS,
    "Turn texts into vectors",
    aliases=("/embeddings",),
)


def routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    @router.get("/models", include_in_schema=False)
    async def list_models() -> dict[str, Any]:
        """The models this server offers."""
        return model_list.openai_list(server.models)

    @router.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> dict[str, Any]:
        """One model."""
        elsewhere = server.models.upstreams
        remote = elsewhere.find(model_id) if elsewhere is not None else None
        if remote is not None and not await server.models.has(model_id):
            return model_list.remote_entry(remote)
        return model_list.entry(server.models.resolve(model_id))

    mount(router, server, CHAT, COMPLETIONS, FILL_IN)
    # llama.cpp's path; its body is that of a chat.
    about = "The prompt that a conversation becomes"
    mount_prompt(router, server, "/apply-template", CHAT, about, lambda text, _: {"prompt": text})

    vectors.mount(router, server, EMBEDDINGS)
    return router
