"""POST /v1/rerank in the format of llama.cpp, Jina and Cohere; with `texts` instead of `documents`,
in that of text-embeddings-inference."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from localllm.engine.worker.embedding import EmbeddingEngine
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.known import read
from localllm.server.dialects.openapi import body_of
from localllm.server.http.asgi import answer_headers
from localllm.server.http.json_body import read_json
from localllm.server.http.streaming import unless_left
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.serving import Server

_MOST_DOCUMENTS = 2048
_ALIASES = ("/rerank", "/reranking", "/v1/reranking", "/v2/rerank")


class _Document(BaseModel):
    text: str


Documents = Annotated[list[str | _Document], Field(min_length=1, max_length=_MOST_DOCUMENTS)]


class RerankFields(RequestBody):
    """POST /v1/rerank."""

    query: str
    documents: Documents | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=_MOST_DOCUMENTS)] | None = Field(
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


def routes(server: Server) -> APIRouter:
    router = APIRouter(tags=["Reranking"])

    async def rerank(request: Request) -> Response:
        """Rank documents by how well they answer a query."""
        fields, ignored = read(RerankFields, await read_json(request, server.settings))
        documents = fields.read_documents()
        model = ranker_for(server.models, fields.model)

        async def work() -> Response:
            with server.serving(model):
                engine = await model.engine()
                if not isinstance(engine, EmbeddingEngine):
                    raise UnsupportedError(f"{model.name} does not rank", param="model")
                scores, tokens = await engine.rank(
                    fields.query, documents, truncate=bool(fields.truncate)
                )
            body = _body(fields, model, documents, scores, tokens)
            return JSONResponse(body, headers=answer_headers(ignored))

        return await unless_left(request, work())

    described = body_of(RerankFields, "results")
    router.add_api_route(
        "/v1/rerank", rerank, methods=["POST"], response_model=None, openapi_extra=described
    )
    for path in _ALIASES:
        router.add_api_route(
            path, rerank, methods=["POST"], response_model=None, include_in_schema=False
        )
    return router


def ranker_for(models: ModelRouter, name: str | None) -> ServedModel:
    """The reranker of that name; without a name the first. Raises UnsupportedError for a model that
    is none."""
    ranking = [m for m in models.list() if m.facts.ranks]
    model = ranking[0] if ranking and not name else models.resolve(name)
    if model.facts.ranks:
        return model
    raise UnsupportedError(
        f"{model.name} does not rank texts",
        hint=f"name a reranker: {', '.join(m.name for m in ranking)}"
        if ranking
        else "fetch a reranker (bge-reranker, Qwen3-Reranker …) and name it, or rank by the "
        "distance of embeddings",
        param="model",
    )


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
