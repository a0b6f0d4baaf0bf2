"""Output that several dialects share: SSE frames, timings, log-probabilities, tool arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from localllm.engine.messages import Timings, TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.fields import RequestBody
from localllm.server.generation.job import ReplyUsage
from localllm.server.serving import Dialect

# The standard library's fastest string encoder. It is called once per token.
quote = json.encoder.encode_basestring_ascii

EVENT_STREAM = "text/event-stream; charset=utf-8"


def comment(said: object) -> bytes:
    """Return an SSE comment, for keep-alives with progress and for facts that are known only after
    the headers were sent. It has no blank line after it and so belongs to the next event, because
    older decoders fail on a block with only a comment."""
    return f": {said}\n".encode()


def frame_error(error: LocalLLMError) -> bytes:
    """Return OpenAI's error inside a stream, and the end of the stream."""
    return b"data: " + json.dumps(error.to_openai()).encode() + b"\n\ndata: [DONE]\n\n"


EVENTS = Dialect(EVENT_STREAM, frame_error, comment)


def timings_body(usage: ReplyUsage, timings: Timings) -> dict[str, Any]:
    """Return llama.cpp's `timings`, in milliseconds and tokens per second. `queued_ms` and
    `predicted_steps` (decode steps) are additions of this server."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    body: dict[str, Any] = {
        "queued_ms": timings.queued_s * 1e3,
        "cache_n": usage.cached_tokens,
        "prompt_n": fresh,
        "prompt_ms": timings.prefill_s * 1e3,
        "prompt_per_second": _per_second(fresh, timings.prefill_s),
    }
    body["draft_n"] = usage.accepted_draft_tokens + usage.rejected_draft_tokens
    body["draft_n_accepted"] = usage.accepted_draft_tokens
    body["predicted_steps"] = timings.decode_steps
    body["predicted_n"] = usage.completion_tokens
    body["predicted_ms"] = timings.decode_s * 1e3
    # The first token is part of prefill.
    decoded = max(0, usage.completion_tokens - 1)
    body["predicted_per_second"] = _per_second(decoded, timings.decode_s)
    return body


def _per_second(tokens: int, duration_s: float) -> float:
    return tokens / duration_s if duration_s > 0 else 0.0


def logprob_entry(p: TokenLogprob) -> dict[str, Any]:
    """Return a token with its alternatives."""
    top = [token_logprob(text, logprob) for text, _, logprob in p.top]
    return {**token_logprob(p.text, p.logprob), "top_logprobs": top}


def token_logprob(text: str, logprob: float) -> dict[str, Any]:
    """Return a token in the format of OpenAI and Ollama. An incomplete character is shown as
    U+FFFD, and `bytes` has its bytes."""
    data = text.encode("utf-8", "surrogateescape")
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class PageFields(RequestBody):
    """Query parameters of a list, under the names of OpenAI and Anthropic."""

    limit: int = Field(20, ge=1, le=1000)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(None, description="an item's id: the page begins behind it")
    after_id: str | None = None
    before_id: str | None = None


def page(listed: Sequence[Mapping[str, Any]], wanted: PageFields) -> dict[str, Any]:
    """Return the page of `listed` that the client wants, by the ids of its items."""
    ids = [one["id"] for one in listed]
    after = wanted.after or wanted.after_id
    before = wanted.before_id
    start = ids.index(after) + 1 if after in ids else 0
    end = min(start + wanted.limit, len(ids))
    more = end < len(ids)
    if before in ids:
        end = ids.index(before)
        start = max(0, end - wanted.limit)
        more = start > 0
    body: dict[str, Any] = {"data": listed[start:end], "first_id": None, "last_id": None}
    if start < end:
        body["first_id"] = ids[start]
        body["last_id"] = ids[end - 1]
    return {**body, "has_more": more}


def arguments_object(arguments: str) -> Any:
    """Return a call's arguments for dialects that send an object. Invalid JSON is kept as text."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"_unparsed": arguments}
