"""The chat's side of the wire: one OpenAI-compatible server, asked over HTTP and read as a stream of small events."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import httpx

from localllm.errors import LocalLLMError, ServerUnreachableError, by_code

_PREFILL = re.compile(r"prefill\D+(\d+)\s*/\s*(\d+)")
_LEFT_OUT = re.compile(r"compacted (\d+) messages, (\d+) tokens")
# Comment lines that only keep the connection open, or come when all is over, say nothing a person waits for.
_NO_NEWS = re.compile(r"|ping|keep-?alive|heartbeat|cache\b.*", re.IGNORECASE)
# Words of our server that deserve a sentence.
_SAID = {"loading": "loading the model", "queued, 0 ahead": "starting"}
_START_AGAIN = "start it again with `localllm serve`, or start the chat again; what was said is kept"
# Names under which servers publish a model's context length; ours comes first.
_CONTEXT_FIELDS = ("context_length", "n_ctx", "max_model_len", "context_window", "max_context_length")


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of one request as the server counted them; `cached` prompt tokens were not computed again, `drafts_right`
    were guessed ahead."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    drafts_right: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's thinking, which is not part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """`done` of `total` prompt tokens are read."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the server says it is doing before it answers (queued, loading)."""

    note: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The conversation did not fit: the server left out this many of its oldest messages."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete: OpenAI's finish reason, and the usage where the server sent it."""

    reason: str
    usage: AnswerUsage | None


StreamEvent: TypeAlias = TextDelta | ReasoningDelta | PrefillDone | Waiting | LeftOut | Done


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One line of /v1/models; `n_ctx` in tokens, None where the server does not say."""

    name: str
    n_ctx: int | None = None


@dataclass
class ChatClient:
    """Talks to `base_url` (…/v1). `sampling` is sent with every request (temperature, seed, max_tokens,
    truncation).

    `transport` replaces the network, as httpx allows. Use as an async context manager, or call `aclose`.
    """

    base_url: str
    api_key: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    transport: httpx.AsyncBaseTransport | None = None
    _http: httpx.AsyncClient | None = field(default=None, init=False, repr=False)

    # A slow machine may read a long prompt for minutes: only connecting has a limit, the user can stop the rest.
    TIMEOUT: ClassVar[httpx.Timeout] = httpx.Timeout(None, connect=5.0)

    @property
    def http(self) -> httpx.AsyncClient:
        if self._http is None:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            # trust_env=False: a proxy set in the environment must not see, or break, what stays on this machine.
            self._http = httpx.AsyncClient(
                base_url=self.base_url, headers=headers, timeout=self.TIMEOUT, trust_env=False, transport=self.transport
            )
        return self._http

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def models(self) -> list[ListedModel]:
        """What the server offers. Raises LocalLLMError."""
        try:
            response = await self.http.get("models")
        except httpx.HTTPError as e:
            raise ServerUnreachableError(
                f"the server at {self.base_url} does not answer: {_reason(e)}", hint=_START_AGAIN
            ) from e
        if response.status_code != 200:
            raise _error(response.status_code, response.content)
        try:
            entries = response.json()["data"]
            return [ListedModel(str(m["id"]), _context(m)) for m in entries]
        except (ValueError, KeyError, TypeError) as e:
            raise ServerUnreachableError(
                f"{self.base_url} does not speak the OpenAI API: {_reason(e)}", hint=_START_AGAIN
            ) from e

    @property
    def compacts(self) -> bool:
        """Whether every request lets the server leave out the oldest messages of a conversation that is too long."""
        return self.sampling.get("truncation") == "auto"

    async def stream(
        self, model: str, messages: Sequence[Mapping[str, Any]], *, compact: bool = False
    ) -> AsyncGenerator[StreamEvent, None]:
        """Ask `model` to continue `messages`; ends after exactly one Done, or raises LocalLLMError.

        `compact` lets the server leave out the oldest messages when not all fit; LeftOut tells how many.

        Closing the iterator closes the connection, which is how the server learns to stop.
        """
        body = {
            **self.sampling,
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"truncation": "auto"} if compact else {}),
        }
        try:
            async with self.http.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _error(response.status_code, await response.aread())
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        yield event
        except httpx.HTTPError as e:
            raise ServerUnreachableError(f"the connection to the server broke: {_reason(e)}", hint=_START_AGAIN) from e


async def _events(response: httpx.Response) -> AsyncGenerator[StreamEvent, None]:
    reason: str | None = None
    usage: AnswerUsage | None = None
    async for line in _lines(response):
        if line.startswith(":"):
            event = _comment(line[1:].strip())
            if event is not None:
                yield event
            continue
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        try:
            chunk = json.loads(data)
        except ValueError as e:
            raise ServerUnreachableError("the server sent a line that is not JSON", hint=_START_AGAIN) from e
        if chunk.get("error"):
            raise _error_body(chunk["error"])
        if chunk.get("usage"):
            usage = _usage(chunk["usage"])
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thinking = delta.get("reasoning_content") or delta.get("reasoning")
            if thinking:
                yield ReasoningDelta(thinking)
            if delta.get("content"):
                yield TextDelta(delta["content"])
            reason = choice.get("finish_reason") or reason
    if reason is None:
        raise ServerUnreachableError("the server ended the answer before it was complete", hint="ask again")
    yield Done(reason, usage)


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines ended by LF only: httpx's own `aiter_lines` also breaks at U+2028 and others, which JSON may hold."""
    buffer = bytearray()
    async for piece in response.aiter_bytes():
        buffer += piece
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            yield line.rstrip(b"\r").decode("utf-8", "replace")
    if buffer:
        yield bytes(buffer).decode("utf-8", "replace")


def _comment(comment: str) -> StreamEvent | None:
    found = _PREFILL.search(comment)
    if found:
        return PrefillDone(int(found[1]), int(found[2]))
    found = _LEFT_OUT.fullmatch(comment)
    if found:
        return LeftOut(int(found[1]), int(found[2]))
    return None if _NO_NEWS.fullmatch(comment) else Waiting(_SAID.get(comment, comment))


def _usage(usage: Mapping[str, Any]) -> AnswerUsage:
    details = usage.get("prompt_tokens_details") or {}
    drafts = usage.get("completion_tokens_details") or {}
    return AnswerUsage(
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        int(details.get("cached_tokens") or 0),
        int(drafts.get("accepted_prediction_tokens") or 0),
    )


def _context(entry: Mapping[str, Any]) -> int | None:
    meta = entry.get("meta")
    for place in (entry, meta if isinstance(meta, Mapping) else {}):
        for name in _CONTEXT_FIELDS:
            value = place.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _error(status: int, body: bytes) -> LocalLLMError:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace").strip()[:200]
        return by_code("backend_error", f"the server answered {status}" + (f": {text}" if text else ""))
    return _error_body(error)


def _error_body(error: Any) -> LocalLLMError:
    if not isinstance(error, Mapping):
        return by_code("backend_error", str(error))
    hint = error.get("hint")
    message = str(error.get("message") or "the server failed without saying why")
    return by_code(str(error.get("code") or ""), message, hint=hint if isinstance(hint, str) else None)


def _reason(e: Exception) -> str:
    return str(e) or type(e).__name__
