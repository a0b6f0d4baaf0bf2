"""The chat's HTTP client: it sends requests to one OpenAI-compatible server and reads a stream of
small events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from localllm import foreign_json
from localllm.addresses import is_loopback
from localllm.errors import ServerUnreachableError
from localllm.foreign_json import JsonPart, MalformedError, parse, well_formed
from localllm.sse import DONE, LineBuffer, data_of
from localllm_tui.control.attachments import as_sent
from localllm_tui.control.interfaces import ChatEngine
from localllm_tui.control.physics import ModelPhysics
from localllm_tui.control.server_errors import refused
from localllm_tui.control.stream_events import StreamEvent, WaitNote
from localllm_tui.control.stream_reader import (
    AnswerReader,
    malformed,
    start_again,
    without_body_positions,
)

if TYPE_CHECKING:
    import httpx  # imported with the first request, so that the first paint does not wait for it

# A slow machine may read a long prompt for minutes: only connecting has a limit, the user can stop
# the rest.
_CONNECT_S = 5.0
_POLL_S = 0.05
# Field names that servers use for a model's context length; our server's name is first.
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
    requests wait until it is loaded. `in_chat`: hints may name the chat's commands.

    `transport` replaces the network, as httpx allows. Use as an async context manager, or call
    `aclose`.
    """

    base_url: str
    api_key: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    transport: httpx.AsyncBaseTransport | None = None
    engine: ChatEngine | None = None
    in_chat: bool = True
    _http: httpx.AsyncClient | None = field(default=None, init=False, repr=False)
    _counts: bool = field(default=True, init=False, repr=False)

    @property
    def http(self) -> httpx.AsyncClient:
        return self._open()

    def _open(self) -> httpx.AsyncClient:
        if self._http is None:
            import httpx

            transport = self.transport
            if transport is None and self.engine is not None and self.engine.unix_socket:
                transport = httpx.AsyncHTTPTransport(uds=self.engine.unix_socket)
            headers = {"Accept-Encoding": "identity"}
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
    def is_local(self) -> bool:
        """True if the server is on this machine, by its address."""
        host = urlsplit(self.base_url).hostname or ""
        return self.engine is not None or is_loopback(host)

    async def move_to(self, engine: ChatEngine) -> None:
        """Send later requests to this engine."""
        await self.aclose()
        self.engine = engine
        self.base_url = engine.base_url
        self.api_key = engine.api_key
        self._counts = True

    @property
    def _unreachable_hint(self) -> str:
        """What the user can do if the server does not answer as it should."""
        if self.engine is not None:
            return start_again(self.engine, in_chat=self.in_chat)
        return f"check the server at {self.base_url}"

    @property
    def ready(self) -> bool:
        """True if the server would start a request now."""
        return self.engine is None or self.engine.progress().state != "loading"

    async def _until_ready(self, model: str) -> AsyncGenerator[WaitNote, None]:
        """Wait for the engine, saying how far it is. Raises what loading `model` ended in, if that
        was waited for: later it is asked for again."""
        if self.engine is None:
            return
        progress = self.engine.progress()
        last_status = ""
        while progress.state == "loading":
            words = progress.words(self.engine.model)
            if words != last_status:
                last_status = words
                yield WaitNote(last_status)
            if self._http is None:
                # Reading httpx's code takes 0.2 s on a busy machine. After the load, the first
                # token would wait for it.
                await asyncio.to_thread(self._open)
            await asyncio.sleep(_POLL_S)
            progress = self.engine.progress()
        if progress.error is not None and (
            progress.down or (last_status and model == self.engine.model)
        ):
            raise progress.error

    async def _get(self, path: str) -> tuple[int, bytes]:
        """The status and the body. Raises ServerUnreachableError."""
        import httpx

        try:
            async with self.http.stream("GET", path) as response:
                return response.status_code, await _body(response)
        except httpx.HTTPError as e:
            raise ServerUnreachableError(
                f"the server at {self.base_url} does not answer: {_reason(e)}",
                hint=self._unreachable_hint,
            ) from e
        except MalformedError as e:
            raise malformed(e, self._unreachable_hint) from e

    async def models(self) -> list[ListedModel]:
        """The models of the server. Raises LocalLLMError."""
        status, body = await self._get("models")
        if status != 200:
            raise refused(status, {}, body)
        try:
            data = parse(body).get("data")
            if data.value is None:
                raise data.wrong("a list")
            return [_listed(entry) for entry in data.items()]
        except MalformedError as e:
            raise ServerUnreachableError(
                f"{self.base_url} does not speak the OpenAI API: {e.message}",
                hint=self._unreachable_hint,
            ) from e

    async def listed(self, name: str) -> ListedModel:
        """The server's entry for this model; one without details if it is not listed. Raises
        LocalLLMError."""
        return next((m for m in await self.models() if m.name == name), ListedModel(name))

    async def model(self, name: str) -> ListedModel | None:
        """The server's entry for `name`, even if it was installed after the list was made; None if
        there is no such model. Raises ServerUnreachableError."""
        status, body = await self._get(f"models/{quote(name, safe='')}")
        if status != 200:
            return None
        try:
            return _listed(parse(body))
        except MalformedError:
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

        asked = {"model": model, "input": as_sent(messages, items=True)}
        try:
            async with self.http.stream("POST", "responses/input_tokens", json=asked) as response:
                status = response.status_code
                self._counts = status not in (404, 405, 501)  # another kind of server
                counted = parse(await _body(response))
            if status == 400:
                return None, without_body_positions(counted.get("error").get("message").text())
            if status != 200:
                return None, ""
            return counted.get("input_tokens").count(), ""
        except (httpx.HTTPError, MalformedError):
            return None, ""

    @property
    def compacts(self) -> bool:
        """True if every request lets the server leave out the oldest messages of a conversation
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
        async with aclosing(self._until_ready(model)) as last_status:
            async for note in last_status:
                yield note
        import httpx

        try:
            async with self.http.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise refused(response.status_code, response.headers, await _body(response))
                async with aclosing(_events(response, self._unreachable_hint)) as events:
                    async for event in events:
                        yield event
        except httpx.HTTPError as e:
            raise ServerUnreachableError(
                f"the connection to the server broke: {_reason(e)}", hint=self._unreachable_hint
            ) from e
        except MalformedError as e:
            raise malformed(e, self._unreachable_hint) from e


async def _events(response: httpx.Response, hint: str) -> AsyncGenerator[StreamEvent, None]:
    answer = AnswerReader(hint)
    kind = response.headers.get("content-type", "")
    if "html" in kind:
        raise MalformedError("it answered with a web page")
    if "json" in kind:  # the server does not stream
        for event in answer.chunk((await _body(response)).decode("utf-8", "replace")):
            yield event
    else:
        async with aclosing(_streamed(response, answer)) as events:
            async for event in events:
                yield event
    for event in answer.end():
        yield event


async def _streamed(
    response: httpx.Response, answer: AnswerReader
) -> AsyncGenerator[StreamEvent, None]:
    is_error = False
    async for line in _lines(response, answer.hint):
        data = data_of(line) or ""
        if data == DONE:
            break
        if line.startswith(":"):
            events = answer.comment(line[1:].strip())
        else:
            is_error = line.startswith("event: error") or (is_error and bool(line))
            events = answer.chunk(data, is_error=is_error)
        for event in events:
            yield event


async def _lines(response: httpx.Response, hint: str) -> AsyncIterator[str]:
    lines = LineBuffer()
    try:
        async for piece in response.aiter_bytes():
            for line in lines.feed(piece):
                yield line
    except MalformedError as e:
        raise malformed(e, hint) from e
    for line in lines.end():
        if _is_whole(line):
            yield line


def _is_whole(line: str) -> bool:
    """False for the beginning of a line, after which the connection ended."""
    data = data_of(line) or ""
    if data == DONE:
        return True
    try:
        parse(data)
    except MalformedError:
        return False
    return True


async def _body(response: httpx.Response) -> bytes:
    """The body of a listing or an error. Raises MalformedError if it is too large."""
    foreign_json.check_uncompressed(response.headers.get("content-encoding"))
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        foreign_json.check_size(body)
    return bytes(body)


def _listed(entry: JsonPart) -> ListedModel:
    model = entry.get("id").text()
    if not model:
        raise entry.get("id").wrong("a model's name")
    meta = JsonPart(entry.get("meta").members())
    lengths = [entry.get(name).count() for name in _CONTEXT_FIELDS]
    lengths += [meta.get(name).count() for name in _CONTEXT_FIELDS]
    notice = entry.get("notice")
    return ListedModel(
        model,
        next((n for n in lengths if n), None),
        ModelPhysics.of(entry.get("physics").members()),
        well_formed(notice.value) if isinstance(notice.value, str) else "",
        entry.get("sampling").members(),
        bool(entry.get("has_system").value),
    )


def _reason(e: Exception) -> str:
    return str(e) or type(e).__name__
