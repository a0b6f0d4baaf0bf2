"""Embeddings in the dialects of OpenAI and Ollama: texts or tokens in, vectors of length 1 out."""

from __future__ import annotations

import base64
import math
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from localllm.engine.embedding import Embeds
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.fields import MAX_TOKENS, _Body
from localllm.server.dialects.openai.chat_reply import ignored_header
from localllm.server.http.streaming import unless_gone
from localllm.server.models.router import ServedModel
from localllm.server.serving import Server, request_id

_MOST_INPUTS = 2048
_Token = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=_MOST_INPUTS)]


class EmbeddingFields(_Body):
    """POST /v1/embeddings."""

    input: (
        str
        | _Texts
        | Annotated[list[_Token], Field(min_length=1)]
        | Annotated[list[Annotated[list[_Token], Field(min_length=1)]], Field(min_length=1, max_length=_MOST_INPUTS)]
    ) = Field(description="a text, texts, token ids, or lists of token ids")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS, description="the first so many numbers, made length 1")


class OllamaEmbed(_Body):
    """POST /api/embed."""

    input: str | _Texts
    truncate: bool | None = Field(None, description="cut what is too long (the default), or refuse it")
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)


class OllamaEmbeddings(_Body):
    """POST /api/embeddings, the older form."""

    prompt: str


def model_for(server: Server, name: str | None) -> ServedModel:
    """The embedding model of that name; no name means the first one. Raises UnsupportedError for one that generates
    text, saying what would help."""
    embedding = [m for m in server.models.list() if m.embeds]
    model = embedding[0] if embedding and not name else server.models.resolve(name)
    if model.embeds:
        return model
    served = ", ".join(m.name for m in embedding)
    raise UnsupportedError(
        f"{model.name} generates text; it makes no embeddings",
        hint=f"name an embedding model: {served}"
        if served
        else "serve an embedding model beside it: `localllm serve MODEL --also EMBEDDING_MODEL`",
        param="model",
    )


async def vectors(
    server: Server, request: Request, model: ServedModel, inputs: Sequence[str | list[int]], *, truncate: bool = False
) -> tuple[list[bytes], int] | None:
    """The vectors as little-endian float32 and the tokens they took; None when the client left first."""
    for i, text in enumerate(inputs):
        if not text:
            raise RequestError(f"input {i} is empty", param="input")

    async def work() -> tuple[list[bytes], int]:
        with server.counted(model):
            engine = await model.engine()
            if not isinstance(engine, Embeds):
                raise UnsupportedError(f"{model.name} makes no embeddings", param="model")
            return await engine.embed(inputs, truncate=truncate)

    return await unless_gone(request, work())


async def openai(server: Server, request: Request, fields: EmbeddingFields, ignored: Sequence[str]) -> Response:
    """OpenAI's answer."""
    model = model_for(server, fields.model)
    found = await vectors(server, request, model, _inputs(fields.input))
    if found is None:
        return Response(status_code=499)
    rows, tokens = found
    shaped = [cut(row, fields.dimensions) for row in rows]
    body = {
        "object": "list",
        "model": model.name,
        "data": [
            {
                "object": "embedding",
                "index": i,
                "embedding": base64.b64encode(row).decode() if fields.encoding_format == "base64" else numbers(row),
            }
            for i, row in enumerate(shaped)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return JSONResponse(body, headers={**request_id(), **ignored_header(ignored)})


async def ollama(server: Server, request: Request, fields: OllamaEmbed, ignored: Sequence[str]) -> Response:
    """Ollama's answer; durations in nanoseconds."""
    started = time.monotonic()
    model = model_for(server, fields.model)
    inputs = [fields.input] if isinstance(fields.input, str) else list(fields.input)
    found = await vectors(server, request, model, inputs, truncate=fields.truncate is not False)
    if found is None:
        return Response(status_code=499)
    body = {
        "model": model.name,
        "embeddings": [numbers(cut(row, fields.dimensions)) for row in found[0]],
        "total_duration": int((time.monotonic() - started) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": found[1],
    }
    return JSONResponse(body, headers={**request_id(), **ignored_header(ignored)})


async def ollama_one(server: Server, request: Request, fields: OllamaEmbeddings, ignored: Sequence[str]) -> Response:
    """The answer of Ollama's older form."""
    found = await vectors(server, request, model_for(server, fields.model), [fields.prompt], truncate=True)
    if found is None:
        return Response(status_code=499)
    return JSONResponse({"embedding": numbers(found[0][0])}, headers={**request_id(), **ignored_header(ignored)})


def cut(row: bytes, dimensions: int | None) -> bytes:
    """The first `dimensions` numbers of a vector, made length 1 again. Raises RequestError when it has fewer."""
    if dimensions is None or 4 * dimensions == len(row):
        return row
    if 4 * dimensions > len(row):
        raise RequestError(f"dimensions: this model's vectors have {len(row) // 4}", param="dimensions")
    short = _floats(row[: 4 * dimensions])
    length = math.sqrt(sum(x * x for x in short))
    scaled = array("f", (x / length if length else x for x in short))
    if sys.byteorder == "big":
        scaled.byteswap()
    return scaled.tobytes()


def numbers(row: bytes) -> list[float]:
    """The numbers of a vector."""
    return list(_floats(row))


def _floats(row: bytes) -> array[float]:
    found = array("f", row)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _inputs(sent: Any) -> list[str | list[int]]:
    if isinstance(sent, str) or (isinstance(sent, list) and sent and isinstance(sent[0], int)):
        return [sent]
    return list(sent)
