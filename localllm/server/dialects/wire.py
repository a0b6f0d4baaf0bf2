"""Output that several dialects share: SSE frames, timings, log-probabilities, tool arguments."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

import localllm
from localllm.engine.messages import Timings, TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.known import BodyPart
from localllm.server.generation.job import PrefillProgress, ReplyUsage
from localllm.server.serving import Dialect

# The standard library's fastest string encoder. It is called once per token.
quote = json.encoder.encode_basestring_ascii

# As llama.cpp's server: b and the build.
FINGERPRINT = f"b{localllm.__version__}-localllm"
EVENT_STREAM = "text/event-stream; charset=utf-8"


def comment(text: object) -> bytes:
    """Return an SSE comment, for keep-alives with progress and for facts that are known only after
    the headers were sent. It has no blank line after it and so belongs to the next event, because
    older decoders fail on a block with only a comment."""
    return f": {text}\n".encode()


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
        "prompt_per_token_ms": _per_token_ms(fresh, timings.prefill_s),
        "prompt_per_second": _per_second(fresh, timings.prefill_s),
    }
    body["draft_n"] = usage.accepted_draft_tokens + usage.rejected_draft_tokens
    body["draft_n_accepted"] = usage.accepted_draft_tokens
    body["predicted_steps"] = timings.decode_steps
    body["predicted_n"] = usage.completion_tokens
    body["predicted_ms"] = timings.decode_s * 1e3
    # The first token is part of prefill.
    decoded = max(0, usage.completion_tokens - 1)
    body["predicted_per_token_ms"] = _per_token_ms(decoded, timings.decode_s)
    body["predicted_per_second"] = _per_second(decoded, timings.decode_s)
    return body


class LiveTelemetry:
    """llama.cpp's `prompt_progress` and `timings` of a stream that has not ended, measured here.

    `per_token`: the client wants `timings` with each piece of text. `of_prompt`: it wants
    `prompt_progress` events."""

    def __init__(self, progress: PrefillProgress, *, per_token: bool, of_prompt: bool) -> None:
        self._progress = progress
        self._per_token = per_token
        self._of_prompt = of_prompt
        self._reported = -1
        self._begun_s = time.monotonic()
        self._first_token_s: float | None = None

    def prefill_reports(self) -> list[dict[str, int]]:
        """Return the new values of `prompt_progress`. The first one counts only cached tokens."""
        if not self._of_prompt:
            return []
        now = self._progress
        counts = [now.cached, now.done] if self._reported < 0 else [now.done]
        return [self._report(n) for n in counts if n > self._reported]

    def last_reports(self) -> list[dict[str, int]]:
        """Return the values of `prompt_progress` that are missing before the first token."""
        if not self._of_prompt or self._reported >= self._progress.total:
            return []
        return [*self.prefill_reports(), *self._rest()]

    def _rest(self) -> list[dict[str, int]]:
        total = self._progress.total
        return [self._report(total)] if total > self._reported else []

    def _report(self, processed: int) -> dict[str, int]:
        self._reported = processed
        time_ms = int((time.monotonic() - self._begun_s) * 1e3)
        now = self._progress
        return {
            "total": now.total, "cache": now.cached, "processed": processed, "time_ms": time_ms
        }  # fmt: skip

    def timings(self) -> dict[str, Any] | None:
        """Return `timings` so far, or None if the client does not want them."""
        now_s = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = now_s
        if not self._per_token:
            return None
        now = self._progress
        usage = ReplyUsage(now.total, now.written, now.cached)
        prefill_s = self._first_token_s - self._begun_s
        return timings_body(usage, Timings(0.0, prefill_s, now_s - self._first_token_s, prefill_s))


class TelemetryFields(BodyPart):
    """llama.cpp's fields for the progress of an answer."""

    timings_per_token: bool | None = Field(
        None, description="`timings` in every chunk of a stream (llama.cpp)"
    )
    return_progress: bool | None = Field(
        None, description="chunks of a stream with `prompt_progress` (llama.cpp)"
    )

    def telemetry(self, progress: PrefillProgress) -> LiveTelemetry:
        """Return the telemetry that the client wants in its stream."""
        return LiveTelemetry(
            progress,
            per_token=bool(self.timings_per_token),
            of_prompt=bool(self.return_progress),
        )


def _per_token_ms(tokens: int, duration_s: float) -> float:
    return duration_s * 1e3 / tokens if tokens else 0.0


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
    after: str | None = Field(None, description="the id of an item; the page starts after it")
    after_id: str | None = None
    before_id: str | None = None


def page(listed: Sequence[Mapping[str, Any]], wanted: PageFields) -> dict[str, Any]:
    """Return the page of `listed` that the client wants, by the ids of its items."""
    ids = [entry["id"] for entry in listed]
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
