"""Embeddings for every dialect: finds the model, runs it, then truncates and encodes the vectors.

Also POST /v1/rerank in the format of llama.cpp, Jina and Cohere. With `texts` instead of
`documents`, it uses the format of text-embeddings-inference."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import Field

from localllm.conversation.messages import flatten
from localllm.engine.messages import MAX_TOKENS
from localllm.engine.worker.embedding import EmbeddingEngine
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.known import BodyPart
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import mount_non_streaming
from localllm.server.http.accounts import caller
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.serving import Server

MAX_INPUTS = 2048
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]


def model_for(models: ModelRouter, name: str | None, *, ranks: bool = False) -> ServedModel:
    """Return the embedding model (if `ranks`, the reranker) of that name, or the first one if there
    is no name. Raises UnsupportedError for a model of another kind."""
    fact = "ranks" if ranks else "embeds"
    capable = [m for m in models.list() if getattr(m.facts, fact)]
    if capable and not name:
        return capable[0]
    model = models.resolve(name)
    if getattr(model.facts, fact):
        return model
    problem = "it is not a reranker" if ranks else "it is not an embedding model"
    kind = "a reranker" if ranks else "an embedding model"
    hint = f"serve {kind} in addition: `localllm serve MODEL --also OTHER_MODEL`"
    if capable:
        hint = f"use {kind}: {', '.join(m.name for m in capable)}"
    raise UnsupportedError(f"{model.name} {_task(model)}; {problem}", hint=hint, param="model")


def _task(model: ServedModel) -> str:
    if model.facts.ranks:
        return "is a reranker"
    if model.facts.embeds:
        return "is an embedding model"
    return "generates text"


class EmbeddedPrompt(BodyPart):
    """An input as an object of llama.cpp's server: its text, or its parts."""

    prompt_string: str | None = None
    content: list[dict[str, Any]] | None = Field(None, max_length=MAX_INPUTS)

    def text(self) -> str:
        """Return the text. Raises RequestError."""
        if self.content is not None:
            return flatten(self.content, "input.content")
        if self.prompt_string is None:
            raise RequestError("an input needs prompt_string or content", param="input")
        return self.prompt_string


TokenIds = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Pieces = Annotated[list[TokenIds | str], Field(min_length=1)]
Inputs = (
    str
    | EmbeddedPrompt
    | Annotated[
        list[TokenIds | str | Pieces | EmbeddedPrompt], Field(min_length=1, max_length=1 << 20)
    ]
)


def each_input(sent: Any) -> list[str | list[int | str]]:
    """Return the inputs as a list. Token ids in `sent` make it one input. Raises RequestError."""
    if isinstance(sent, list) and not any(isinstance(piece, int) for piece in sent):
        if len(sent) > MAX_INPUTS:
            raise RequestError(f"input has more than {MAX_INPUTS} entries: split it", param="input")
        return [each_input(entry)[0] for entry in sent] if _is_nested(sent) else sent
    if isinstance(sent, EmbeddedPrompt):
        return [sent.text()]
    return [sent]


def _is_nested(sent: Sequence[Any]) -> bool:
    return any(not isinstance(entry, str) for entry in sent)


async def embed(
    server: Server,
    name: str | None,
    inputs: Sequence[str | list[int | str]],
    *,
    truncate: bool = False,
    keep_s: float | None = None,
) -> tuple[str, list[bytes], int]:
    """Return the model's name, the vectors of `inputs` (float32), and the number of tokens in
    `inputs`.

    `truncate`: cut inputs that are too long instead of refusing them. `keep_s`: as in
    TranslatedRequest. Raises LocalLLMError."""
    model = model_for(server.models, name)
    for i, text in enumerate(inputs):
        if not text:
            raise RequestError(f"input {i} is empty", param="input")
    with server.serving(model, keep_s):
        if not inputs:
            return model.name, [], 0
        engine = cast(EmbeddingEngine, await model.engine())
        plain = [await _without_texts(engine, one) for one in inputs]
        rows, n_tokens = await engine.embed(plain, truncate=truncate)
        server.totals.add_embedding(n_tokens)
        caller().charge(n_tokens, 0, 0)
    return model.name, rows, n_tokens


async def _without_texts(engine: EmbeddingEngine, sent: str | list[int | str]) -> str | list[int]:
    """Return an input as a text or token ids. Texts among token ids become tokens."""
    if isinstance(sent, str):
        return sent
    ids: list[int] = []
    for piece in sent:
        ids += await engine.tokenize(piece) if isinstance(piece, str) else [piece]
    return ids


def cut(row: bytes, dimensions: int | None) -> bytes:
    """Return the first `dimensions` numbers of a vector, normalised again. Raises RequestError if
    the vector has fewer."""
    if dimensions is None or 4 * dimensions == len(row):
        return row
    if 4 * dimensions > len(row):
        raise RequestError(
            f"dimensions: the maximum of this model is {len(row) // 4}", param="dimensions"
        )
    short = numbers(row[: 4 * dimensions])
    length = math.sqrt(sum(x * x for x in short)) or 1.0
    return array("f", (x / length for x in short)).tobytes()


def numbers(row: bytes) -> list[float]:
    return list(array("f", row))


class _Document(BodyPart):
    text: str


Documents = Annotated[list[str | _Document], Field(min_length=1, max_length=MAX_INPUTS)]


def as_text(document: str | _Document) -> str:
    return document if isinstance(document, str) else document.text


class RerankFields(RequestBody):
    """POST /v1/rerank."""

    query: str
    documents: Documents | None = None
    texts: Texts | None = Field(
        None, description="as `documents`; the reply has the format of text-embeddings-inference"
    )
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="number of best documents to return; default: all"
    )
    return_documents: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = Field(
        None, description="truncate inputs that are too long instead of rejecting them"
    )


def routes(server: Server) -> Paths:
    paths = Paths("Reranking")

    async def rerank(fields: RerankFields) -> Any:
        if (fields.documents is None) == (fields.texts is None):
            raise RequestError("send the documents as `documents`", param="documents")
        documents = fields.texts or [as_text(document) for document in fields.documents or ()]
        model = model_for(server.models, fields.model, ranks=True)
        with server.serving(model):
            engine = cast(EmbeddingEngine, await model.engine())
            scores, tokens = await engine.rank(
                fields.query, documents, truncate=bool(fields.truncate)
            )
        best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: fields.top_n]
        results: list[dict[str, Any]] = []
        if fields.texts is not None:
            for i in best:
                results.append({"index": i, "score": scores[i]})
                if fields.return_text:
                    results[-1]["text"] = documents[i]
            return results
        for i in best:
            results.append({"index": i, "relevance_score": scores[i]})
            if fields.return_documents:
                results[-1]["document"] = {"text": documents[i]}
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"model": model.name, "object": "list", "usage": usage, "results": results}

    mount_non_streaming(
        paths,
        server,
        "/v1/rerank",
        RerankFields,
        rerank,
        "Rank documents by their relevance to a query",
        ("results",),
        ("/rerank", "/reranking", "/v1/reranking", "/v2/rerank"),
    )
    return paths
