"""Embeddings for every dialect: choosing the model, running it, truncating and encoding the
vectors."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.engine.worker.embedding import EmbeddingEngine
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.known import read
from localllm.server.dialects.paths import Endpoint, Paths
from localllm.server.dialects.route import Route, mount_answer
from localllm.server.http.accounts import caller
from localllm.server.http.asgi import answer_headers
from localllm.server.http.json_body import read_json
from localllm.server.http.streaming import unless_left
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.serving import Server

MOST_INPUTS = 2048
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS)]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed; `body` makes the answer of the vectors (little-endian float32) and the token
    count. `truncate`: cut inputs that are too long instead of refusing them. `keep_s`: as in
    TranslatedRequest."""

    inputs: Sequence[str | list[int]]
    body: Callable[[list[bytes], int], Mapping[str, Any]]
    truncate: bool = False
    keep_s: float | None = None


def model_for(models: ModelRouter, name: str | None, *, ranks: bool = False) -> ServedModel:
    """The embedding model (or the one that `ranks`) of that name; without a name the first. Raises
    UnsupportedError for a model of another kind."""

    def is_able(model: ServedModel) -> bool:
        return model.facts.ranks if ranks else model.facts.embeds

    able = [m for m in models.list() if is_able(m)]
    model = able[0] if able and not name else models.resolve(name)
    if is_able(model):
        return model
    lacks = "does not rank texts" if ranks else "makes no embeddings"
    does = "ranks" if model.facts.ranks else "embeds" if model.facts.embeds else "generates text"
    kind = "a reranker" if ranks else "an embedding model"
    raise UnsupportedError(
        f"{model.name} {does}; it {lacks}",
        hint=f"name {kind}: {', '.join(m.name for m in able)}"
        if able
        else f"serve {kind} beside it: `localllm serve MODEL --also OTHER_MODEL`",
        param="model",
    )


def mount(paths: Paths, server: Server, *routes: Route[Any, EmbeddingRequest]) -> None:
    for route in routes:
        mount_answer(paths, route, _answering(server, route))


def _answering(server: Server, route: Route[Any, EmbeddingRequest]) -> Endpoint:
    async def answer(request: Request) -> Response:
        fields, ignored = read(route.fields, await read_json(request, server.settings))
        model = model_for(server.models, fields.model)
        translated = route.translate(fields, model)
        for i, text in enumerate(translated.inputs):
            if not text:
                raise RequestError(f"input {i} is empty", param="input")
        kept = ["keep_alive"] if translated.keep_s is not None and not caller().admin else []

        async def work() -> Response:
            with server.serving(model, translated.keep_s):
                vectors, n_tokens = await _embed(model, translated)
            return JSONResponse(
                translated.body(vectors, n_tokens), headers=answer_headers([*ignored, *kept])
            )

        return await unless_left(request, work())

    return answer


async def _embed(model: ServedModel, asked: EmbeddingRequest) -> tuple[list[bytes], int]:
    """The vectors, and how many tokens were read. Raises UnsupportedError."""
    if not asked.inputs:
        return [], 0
    engine = await model.engine()
    if not isinstance(engine, EmbeddingEngine):
        raise UnsupportedError(f"{model.name} makes no embeddings", param="model")
    vectors, n_tokens = await engine.embed(asked.inputs, truncate=asked.truncate)
    caller().charge(n_tokens, 0, 0)
    return vectors, n_tokens


def cut(row: bytes, dimensions: int | None) -> bytes:
    """The first `dimensions` numbers of a vector, normalised again. Raises RequestError if it has
    fewer."""
    if dimensions is None or 4 * dimensions == len(row):
        return row
    if 4 * dimensions > len(row):
        raise RequestError(
            f"dimensions: this model's vectors have {len(row) // 4}", param="dimensions"
        )
    short = _floats(row[: 4 * dimensions])
    length = math.sqrt(sum(x * x for x in short))
    scaled = array("f", (x / length if length else x for x in short))
    if sys.byteorder == "big":
        scaled.byteswap()
    return scaled.tobytes()


def numbers(row: bytes) -> list[float]:
    return list(_floats(row))


def _floats(row: bytes) -> array[float]:
    found = array("f", row)
    if sys.byteorder == "big":
        found.byteswap()
    return found
