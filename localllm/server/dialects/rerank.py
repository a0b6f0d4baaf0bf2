"""POST /v1/rerank in the format of llama.cpp, Jina and Cohere; with `texts` instead of `documents`,
in that of text-embeddings-inference."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from localllm.engine.worker.embedding import EmbeddingEngine
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.known import BodyPart
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import mount_whole
from localllm.server.dialects.vectors import model_for
from localllm.server.models.router import ServedModel
from localllm.server.serving import Server

_MOST_DOCUMENTS = 2048
_ALIASES = ("/rerank", "/reranking", "/v1/reranking", "/v2/rerank")


class _Document(BodyPart):
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


def routes(server: Server) -> Paths:
    paths = Paths("Reranking")

    async def rerank(fields: RerankFields) -> Any:
        documents = fields.read_documents()
        model = model_for(server.models, fields.model, ranks=True)
        with server.serving(model):
            engine = await model.engine()
            if not isinstance(engine, EmbeddingEngine):
                raise UnsupportedError(f"{model.name} does not rank", param="model")
            scores, tokens = await engine.rank(
                fields.query, documents, truncate=bool(fields.truncate)
            )
        return _body(fields, model, documents, scores, tokens)

    mount_whole(
        paths,
        server,
        "/v1/rerank",
        RerankFields,
        rerank,
        "Rank documents by how well they answer a query",
        ("results",),
        _ALIASES,
    )
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
