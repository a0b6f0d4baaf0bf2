"""POST /api/embed and the older /api/embeddings: texts in, vectors of length 1 out."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from localllm.server.dialects.fields import MAX_TOKENS, Body
from localllm.server.dialects.ollama.keep_alive import keep_alive_s
from localllm.server.dialects.vectors import Texts, VectorOrder, cut, numbers
from localllm.server.models.router import ServedModel


class OllamaEmbed(Body):
    """POST /api/embed."""

    input: str | Texts
    truncate: bool | None = Field(None, description="cut what is too long (the default), or refuse it")
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)
    keep_alive: str | float | None = None


class OllamaEmbeddings(Body):
    """POST /api/embeddings, the older form."""

    prompt: str
    keep_alive: str | float | None = None


def order(fields: OllamaEmbed, model: ServedModel) -> VectorOrder:
    """The vectors as Ollama writes them down; durations in nanoseconds."""
    started = time.monotonic()

    def body(rows: list[bytes], tokens: int) -> dict[str, Any]:
        return {
            "model": model.name,
            "embeddings": [numbers(cut(row, fields.dimensions)) for row in rows],
            "total_duration": int((time.monotonic() - started) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": tokens,
        }

    inputs = [fields.input] if isinstance(fields.input, str) else list(fields.input)
    return VectorOrder(inputs, body, truncate=fields.truncate is not False, keep_s=keep_alive_s(fields.keep_alive))


def older_order(fields: OllamaEmbeddings, model: ServedModel) -> VectorOrder:
    """The one vector of Ollama's older form."""

    def body(rows: list[bytes], tokens: int) -> dict[str, Any]:
        return {"embedding": numbers(rows[0])}

    return VectorOrder([fields.prompt], body, truncate=True, keep_s=keep_alive_s(fields.keep_alive))
