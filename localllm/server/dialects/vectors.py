"""Embeddings for every dialect: choosing the model, running it, truncating and encoding the
vectors. And ranks: POST /v1/rerank in the format of llama.cpp, Jina and Cohere; with `texts` instead
of `documents`, in that of text-embeddings-inference."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from localllm.engine.worker.embedding import EmbeddingEngine
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.known import BodyPart
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import Route, mount_whole
from localllm.server.http.accounts import caller
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.serving import Server

MOST_INPUTS = 2048
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS)]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed; `body` makes the answer of the vectors (float32) and the token
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
        answer = partial(_embedded, server, route)
        mount_whole(paths, server, route.path, route.fields, answer, route.about, (), route.aliases)


async def _embedded(server: Server, route: Route[Any, EmbeddingRequest], fields: Any) -> Any:
    model = model_for(server.models, fields.model)
    asked = route.translate(fields, model)
    for i, text in enumerate(asked.inputs):
        if not text:
            raise RequestError(f"input {i} is empty", param="input")
    with server.serving(model, asked.keep_s):
        if not asked.inputs:
            return asked.body([], 0)
        engine = await _engine(model)
        vectors, n_tokens = await engine.embed(asked.inputs, truncate=asked.truncate)
        caller().charge(n_tokens, 0, 0)
    return asked.body(vectors, n_tokens)


async def _engine(model: ServedModel) -> EmbeddingEngine:
    engine = await model.engine()
    assert isinstance(engine, EmbeddingEngine)
    return engine


def cut(row: bytes, dimensions: int | None) -> bytes:
    """The first `dimensions` numbers of a vector, normalised again. Raises RequestError if it has
    fewer."""
    if dimensions is None or 4 * dimensions == len(row):
        return row
    if 4 * dimensions > len(row):
        raise RequestError(
            f"dimensions: this model's vectors have {len(row) // 4}", param="dimensions"
        )
    short = numbers(row[: 4 * dimensions])
    length = math.sqrt(sum(x * x for x in short))
    return array("f", (x / length if length else x for x in short)).tobytes()


def numbers(row: bytes) -> list[float]:
    return list(array("f", row))


_ALIASES = ("/rerank", "/reranking", "/v1/reranking", "/v2/rerank")


class _Document(BodyPart):
    text: str


Documents = Annotated[list[str | _Document], Field(min_length=1, max_length=MOST_INPUTS)]


class RerankFields(RequestBody):
    """POST /v1/rerank."""

    query: str
    documents: Documents | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS)] | None = Field(
        None, description="the same, answered as text-embeddings-inference does"
    )
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="the best so many; default: all"
    )
    return_documents: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = Field(None, description="cut what is too long instead of refusing it")

    def read_documents(self) -> list[str]:
        """The documents, from either field. Raises RequestError."""
        if (self.documents is None) == (self.texts is None):
            raise RequestError("send the documents as `documents`", param="documents")
        return [d if isinstance(d, str) else d.text for d in self.documents or self.texts or ()]


def routes(server: Server) -> Paths:
    paths = Paths("Reranking")

    async def rerank(fields: RerankFields) -> Any:
        documents = fields.read_documents()
        model = model_for(server.models, fields.model, ranks=True)
        with server.serving(model):
            engine = await _engine(model)
            scores, tokens = await engine.rank(
                fields.query, documents, truncate=bool(fields.truncate)
            )
        return _body(fields, model, documents, scores, tokens)

    about = "Rank documents by how well they answer a query"
    mount_whole(paths, server, "/v1/rerank", RerankFields, rerank, about, ("results",), _ALIASES)
    return paths


def _body(
    fields: RerankFields, model: ServedModel, documents: list[str], scores: list[float], tokens: int
) -> Any:
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: fields.top_n]
    if fields.texts is not None:
        listed: list[dict[str, Any]] = [{"index": i, "score": scores[i]} for i in best]
        for entry in listed if fields.return_text else ():
            entry["text"] = documents[entry["index"]]
        return listed
    results: list[dict[str, Any]] = []
    for i in best:
        document = {"document": {"text": documents[i]}} if fields.return_documents else {}
        results.append({"index": i, "relevance_score": scores[i], **document})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"model": model.name, "object": "list", "usage": usage, "results": results}
