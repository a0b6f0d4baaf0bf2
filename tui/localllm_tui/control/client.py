"""The chat's side of the wire: one OpenAI-compatible server, asked over HTTP and read as a stream
of small events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from localllm.errors import LocalLLMError, ServerUnreachableError, by_code
from localllm.sse import DONE, LineBuffer, data_of
from localllm_tui.control.attachments import as_sent
from localllm_tui.control.interfaces import ChatEngine
from localllm_tui.control.physics import ModelPhysics
from localllm_tui.control.stream_events import (
    AnswerDone,
    AnswerTimings,
    AnswerUsage,
    MessagesLeftOut,
    PromptProgress,
    StreamEvent,
    TextDelta,
    ToolCall,
    WaitNote,
)

if TYPE_CHECKING:
    import httpx  # imported with the first request: the first paint does not wait for it

_PREFILL = re.compile(r"prefill\D+(\d+)\s*/\s*(\d+)")
_CACHE = re.compile(r"cache \d+/\d+ tokens; (.+)")
_LEFT_OUT = re.compile(r"compacted (\d+) messages, \d+ tokens")
# SSE comments that keep the connection open, or come at the end, are not shown.
_NO_NEWS = re.compile(r"|ping|keep-?alive|heartbeat|cache\b.*", re.IGNORECASE)
# Comments of our server, as they are shown.
_SAID = {"loading": "loading the model", "queued, 0 ahead": "starting"}
_START_AGAIN = (
    "start it again with `localllm serve` and /retry, or leave: `localllm chat --continue` loads the "
    "model in the chat; what was said is kept"
)
# A slow machine may read a long prompt for minutes: only connecting has a limit, the user can stop
# the rest.
_CONNECT_S = 5.0
_LOOK_S = 0.05
# Names under which servers publish a model's context length; ours comes first.
_CONTEXT_FIELDS = (
    "context_length",
    "n_ctx",
    "max_model_len",
    "context_window",
    "max_context_length",
)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One entry of /v1/models. `n_ctx`: tokens, None if the server does not list it. `physics`: the
    cost of a token and the speed of the machine, from a server that plans
    (localllm/planner/serialise.py). `notice`: a sentence for the users about how the model runs
    now. `sampling`: the defaults of a request. `has_system`: the preset adds its system prompt to a
    conversation without one."""

    name: str
    n_ctx: int | None = None
    physics: ModelPhysics | None = None
    notice: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    has_system: bool = False


@dataclass
class ChatClient:
    """A client of the server at `base_url` (…/v1). `sampling` is sent with every request
    (temperature, seed, max_tokens, truncation). `engine`: the engine of this server if it is known;
    requests wait until it is loaded.

    `transport` replaces the network, as httpx allows. Use as an async context manager, or call
    `aclose`.
    """

    base_url: str
    api_key: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    transport: httpx.AsyncBaseTransport | None = None
    engine: ChatEngine | None = None
    _http: httpx.AsyncClient | None = field(default=None, init=False, repr=False)
    _counts: bool = field(default=True, init=False, repr=False)

    @property
    def http(self) -> httpx.AsyncClient:
        if self._http is None:
            import httpx

            transport = self.transport
            if transport is None and self.engine is not None and self.engine.unix_socket:
                transport = httpx.AsyncHTTPTransport(uds=self.engine.unix_socket)
            headers = {}
            if self.api_key:
                headers["Authorization"] = f"Bearer {self.api_key}"
            # trust_env=False: a proxy set in the environment must not see, or break, what stays on
            # this machine.
            self._http = httpx.AsyncClient(
                base_url=self.base_url,
                headers=headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                trust_env=False,
                transport=transport,
            )
        return self._http

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    @property
    def ready(self) -> bool:
        """Whether a request would be taken up now."""
        return self.engine is None or self.engine.progress().state != "loading"

    async def _until_ready(self, model: str) -> AsyncGenerator[WaitNote, None]:
        """Wait for the engine, saying how far it is. Raises what loading `model` ended in, if that
        was waited for: later it is asked for again."""
        if self.engine is None:
            return
        progress = self.engine.progress()
        said = ""
        while progress.state == "loading":
            words = progress.words(self.engine.model)
            if words != said:
                said = words
                yield WaitNote(said)
            await asyncio.sleep(_LOOK_S)
            progress = self.engine.progress()
        if progress.error is not None and (progress.down or (said and model == self.engine.model)):
            raise progress.error

    async def _get(self, path: str) -> httpx.Response:
        import httpx

        try:
            return await self.http.get(path)
        except httpx.HTTPError as e:
            raise ServerUnreachableError(
                f"the server at {self.base_url} does not answer: {_reason(e)}", hint=_START_AGAIN
            ) from e

    async def models(self) -> list[ListedModel]:
        """The models of the server. Raises LocalLLMError."""
        response = await self._get("models")
        if response.status_code != 200:
            raise _error(response.status_code, response.content)
        try:
            return [_listed(entry) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as e:
            raise ServerUnreachableError(
                f"{self.base_url} does not speak the OpenAI API: {_reason(e)}", hint=_START_AGAIN
            ) from e

    async def listed(self, name: str) -> ListedModel:
        """The server's entry for this model; one without details if it is not listed. Raises
        LocalLLMError."""
        return next((m for m in await self.models() if m.name == name), ListedModel(name))

    async def model(self, name: str) -> ListedModel | None:
        """The server's entry for `name`, even if it was installed after the list was made; None if
        there is no such model. Raises ServerUnreachableError."""
        response = await self._get(f"models/{quote(name, safe='')}")
        if response.status_code != 200:
            return None
        try:
            return _listed(response.json())
        except (ValueError, KeyError, TypeError):
            return None

    async def count(self, model: str, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """The number of tokens of `messages` for `model`; None if the server can't count."""
        return (await self.counted(model, messages))[0]

    async def counted(
        self, model: str, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[int | None, str]:
        """`count`, and the server's reason if it rejects these messages."""
        if not self._counts or not self.ready:
            return None, ""
        import httpx

        try:
            response = await self.http.post(
                "responses/input_tokens",
                json={"model": model, "input": as_sent(messages, items=True)},
            )
            self._counts = response.status_code not in (404, 405, 501)  # another kind of server
            if response.status_code == 400:
                return None, of_a_person(str(response.json()["error"]["message"]))
            if response.status_code != 200:
                return None, ""
            return int(response.json()["input_tokens"]), ""
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None, ""

    @property
    def compacts(self) -> bool:
        """Whether every request lets the server leave out the oldest messages of a conversation
        that is too long."""
        return self.sampling.get("truncation") == "auto"

    async def stream(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        compact: bool = False,
        continues: bool = False,
        sampling: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AsyncGenerator[StreamEvent, None]:
        """Ask `model` to continue `messages`; ends after exactly one AnswerDone, or raises
        LocalLLMError.

        `compact` lets the server leave out the oldest messages if not all fit; MessagesLeftOut
        gives their number. `continues`: the last message is an answer to be continued. `sampling`
        takes precedence over the client's own. `tools` are offered to the model: its calls come as
        ToolCalls before AnswerDone.

        Closing the iterator closes the connection, and the server then stops.
        """
        body: dict[str, Any] = {**self.sampling, **(sampling or {})}
        body["model"] = model
        body["messages"] = as_sent(messages)
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
        if tools:
            body["tools"] = list(tools)
        if compact:
            body["truncation"] = "auto"
        if continues:
            body["continue_final_message"] = True
            body["add_generation_prompt"] = False
        async with aclosing(self._until_ready(model)) as said:
            async for note in said:
                yield note
        import httpx

        try:
            async with self.http.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _error(response.status_code, await response.aread())
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        yield event
        except httpx.HTTPError as e:
            raise ServerUnreachableError(
                f"the connection to the server broke: {_reason(e)}", hint=_START_AGAIN
            ) from e


async def _events(response: httpx.Response) -> AsyncGenerator[StreamEvent, None]:
    answer = _AnswerSoFar()
    async for line in _lines(response):
        data = data_of(line) or ""
        if data == DONE:
            break
        if line.startswith(":"):
            events = answer.comment(line[1:].strip())
        else:
            events = answer.chunk(data)
        for event in events:
            yield event
    for event in answer.end():
        yield event


@dataclass(slots=True)
class _AnswerSoFar:
    """The state of an answer after the lines of its stream so far."""

    reason: str | None = None
    usage: AnswerUsage | None = None
    cache_miss: str = ""
    timings: AnswerTimings | None = None
    calls: dict[int, ToolCall] = field(default_factory=dict)

    def comment(self, text: str) -> Iterator[StreamEvent]:
        noted = _CACHE.fullmatch(text)
        if noted:
            self.cache_miss = noted[1]
        prefill = _PREFILL.search(text)
        left_out = _LEFT_OUT.fullmatch(text)
        if prefill:
            yield PromptProgress(int(prefill[1]), int(prefill[2]))
        elif left_out:
            yield MessagesLeftOut(int(left_out[1]))
        elif not _NO_NEWS.fullmatch(text):
            yield WaitNote(_SAID.get(text, text))

    def chunk(self, data: str) -> Iterator[StreamEvent]:
        """Yield the events of a chunk of the stream. An empty chunk has no events."""
        try:
            chunk = json.loads(data or "{}")
        except ValueError as e:
            raise ServerUnreachableError(
                "the server sent a line that is not JSON", hint=_START_AGAIN
            ) from e
        if chunk.get("error"):
            raise _error_body(chunk["error"])
        if chunk.get("usage"):
            self.usage = _usage(chunk["usage"])
        if isinstance(chunk.get("timings"), Mapping):
            self.timings = _timings(chunk["timings"])
        for choice in chunk.get("choices") or ():
            self.reason = choice.get("finish_reason") or self.reason
            yield from self._delta(choice.get("delta") or {})

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[StreamEvent]:
        thinking = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if thinking or delta.get("content"):
            yield TextDelta(delta.get("content") or "", thinking)
        for piece in delta.get("tool_calls") or ():
            self._add_to_call(piece)

    def _add_to_call(self, piece: Mapping[str, Any]) -> None:
        at = int(piece.get("index") or 0)
        old = self.calls.get(at, ToolCall("", "", ""))
        function = piece.get("function") or {}
        name = function.get("name") or ""
        arguments = function.get("arguments") or ""
        self.calls[at] = ToolCall(
            str(piece.get("id") or old.id), f"{old.name}{name}", f"{old.arguments}{arguments}"
        )

    def end(self) -> Iterator[StreamEvent]:
        if self.reason is None:
            raise ServerUnreachableError(
                "the server ended the answer before it was complete", hint="ask again"
            )
        yield from self.calls.values()
        yield AnswerDone(self.reason, self.usage, self.cache_miss, self.timings)


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    lines = LineBuffer()
    async for piece in response.aiter_bytes():
        for line in lines.feed(piece):
            yield line
    for line in lines.end():
        yield line


def _usage(usage: Mapping[str, Any]) -> AnswerUsage:
    details = usage.get("prompt_tokens_details") or {}
    return AnswerUsage(
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        int(details.get("cached_tokens") or 0),
    )


def _timings(said: Mapping[str, Any]) -> AnswerTimings:
    def number(name: str) -> float:
        value = said.get(name)
        if isinstance(value, (int, float)):
            return float(value)
        return 0.0

    return AnswerTimings(
        number("queued_ms") / 1e3,
        number("prompt_ms") / 1e3,
        int(number("prompt_n")),
        number("predicted_ms") / 1e3,
        int(number("predicted_steps")),
        int(number("draft_n")),
        int(number("draft_n_accepted")),
    )


def _listed(entry: Mapping[str, Any]) -> ListedModel:
    meta = _table(entry, "meta")
    lengths = [*map(entry.get, _CONTEXT_FIELDS), *map(meta.get, _CONTEXT_FIELDS)]
    return ListedModel(
        str(entry["id"]),
        next((n for n in lengths if isinstance(n, int) and n > 0), None),
        ModelPhysics.of(_table(entry, "physics")),
        str(entry.get("notice") or ""),
        _table(entry, "sampling"),
        bool(entry.get("has_system")),
    )


def _table(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = entry.get(name)
    if isinstance(found, Mapping):
        return found
    return {}


def _error(status: int, body: bytes) -> LocalLLMError:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace").strip()[:200]
        if text:
            return by_code("backend_error", f"the server answered {status}: {text}")
        return by_code("backend_error", f"the server answered {status}")
    return _error_body(error)


def _error_body(error: Any) -> LocalLLMError:
    if not isinstance(error, Mapping):
        return by_code("backend_error", str(error))
    message = of_a_person(str(error.get("message") or "the server failed without saying why"))
    hint = error.get("hint")
    if not isinstance(hint, str):
        hint = None
    return by_code(str(error.get("code") or ""), message, hint=hint)


# Where in a request's body something is: messages[2].content[0].image_url.url, messages.2.content.
_SPOT = re.compile(
    r"\b(?:messages|input|tools)(?:\[\d+\]|\.\d+)(?:\.[a-z_]+|\[\d+\]|\.\d+)*(?::\s*|\s+)"
)


def of_a_person(message: str) -> str:
    """A server's error message without the positions in the request's body, which the user did not
    write."""
    return _SPOT.sub("", message)


def _reason(e: Exception) -> str:
    return str(e) or type(e).__name__
