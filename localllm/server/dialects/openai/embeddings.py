"""POST /v1/embeddings: texts or tokens in, vectors of length 1 out."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import Field

from localllm.server.dialects.fields import MAX_TOKENS, Body
from localllm.server.dialects.vectors import MOST_INPUTS, Texts, VectorOrder, cut, numbers
from localllm.server.models.router import ServedModel

_Token = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class EmbeddingFields(Body):
    """POST /v1/embeddings."""

    input: (
        str
        | Texts
        | Annotated[list[_Token], Field(min_length=1)]
        | Annotated[list[Annotated[list[_Token], Field(min_length=1)]], Field(min_length=1, max_length=MOST_INPUTS)]
    ) = Field(description="a text, texts, token ids, or lists of token ids")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS, description="the first so many numbers, made length 1")


def order(fields: EmbeddingFields, model: ServedModel) -> VectorOrder:
    """The vectors as OpenAI writes them down."""

    def body(rows: list[bytes], tokens: int) -> dict[str, Any]:
        shaped = [cut(row, fields.dimensions) for row in rows]
        as_text = fields.encoding_format == "base64"
        return {
            "object": "list",
            "model": model.name,
            "data": [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": base64.b64encode(row).decode() if as_text else numbers(row),
                }
                for i, row in enumerate(shaped)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    return VectorOrder(_inputs(fields.input), body)


def _inputs(sent: Any) -> list[str | list[int]]:
    if isinstance(sent, str) or (isinstance(sent, list) and sent and isinstance(sent[0], int)):
        return [sent]
    return list(sent)
