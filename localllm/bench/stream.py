"""A minimal client for timing any OpenAI-compatible server: SSE lines and a clock.

Per token, httpx takes 56 µs of CPU time and http.client 37 µs (both with its JSON, a busy Xeon).
That is 0.2 % of the time per token at 100 tok/s.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx

from localllm import sse
from localllm.errors import BackendError
from localllm.foreign_json import JsonPart, MalformedError, check_uncompressed, parse, read

Messages = list[dict[str, str]]

_TIMEOUT_S = 300.0
# Seconds. Even a large model is read from disk in less time.
_LOADING_TIMEOUT_S = 300.0
# Fields that many servers support and OpenAI's API lacks. They are omitted for a server that
# rejects them.
_OPTIONAL_FIELDS = ("ignore_eos",)


@dataclass
class StreamedAnswer:
    """A streamed answer and the times of its pieces.

    `first_at_s`: a value of perf_counter.
    `gaps_s`, `later`: one entry for every piece after the first: the seconds before it, and its
    text.
    """

    text: str = ""
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    later: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    first_at_s: float = 0.0

    @property
    def pieces(self) -> int:
        if self.text:
            return len(self.gaps_s) + 1
        return 0

    @property
    def reported_tokens(self) -> int | None:
        """Tokens of the answer as counted by the server; None if it sends no count."""
        n_tokens = self.usage.get("completion_tokens")
        if isinstance(n_tokens, int) and not isinstance(n_tokens, bool):
            return n_tokens
        return None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server had in its cache; None if it sends no count."""
        details = self.usage.get("prompt_tokens_details")
        if not isinstance(details, dict):
            return None
        cached = details.get("cached_tokens")
        return cached if isinstance(cached, int) else None

    def gaps_between(self, begun_s: float, ended_s: float) -> list[tuple[float, str]]:
        """The gaps that overlap this time (values of perf_counter), each with the text that
        followed."""
        gaps = []
        started_s = self.first_at_s
        for gap_s, text in zip(self.gaps_s, self.later, strict=True):
            if started_s < ended_s and started_s + gap_s > begun_s:
                gaps.append((gap_s, text))
            started_s += gap_s
        return gaps

    def rate(self, tokens: int) -> float:
        """Return tokens per second after the first event, for an answer of `tokens` tokens.

        An event contains several tokens if drafts were accepted. Infinite if all pieces came at
        once.
        """
        seconds = sum(self.gaps_s)
        if seconds:
            return (tokens - 1) / seconds
        return float("inf")

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first event. Without a count by the server, each event counts
        as one token."""
        return self.rate(self.reported_tokens or self.pieces)


@dataclass(frozen=True, slots=True)
class _Reply:
    """A complete reply. `body` has at most 8 MiB."""

    status: int
    body: bytes

    def excerpt(self, max_chars: int) -> str:
        return self.body[:max_chars].decode("utf-8", "replace")


@dataclass
class BenchTarget:
    """A server to measure.

    `url`: ends in /v1.
    `model`: the model named in requests.
    `restart`: stops the server and starts it again.
    `refused`: fields that the server has rejected.
    """

    name: str
    url: str
    model: str = ""
    key: str = ""
    restart: Callable[[], None] | None = None
    refused: set[str] = field(default_factory=set)

    @property
    def root(self) -> str:
        """The address without /v1: llama-server and localllm have their own paths there."""
        return self.url.rstrip("/").removesuffix("/v1")

    def chat(self, messages: Messages, max_tokens: int, **options: Any) -> StreamedAnswer:
        """One greedy streamed chat answer of at most `max_tokens` tokens, and of exactly
        `max_tokens` if the server knows ignore_eos. `options`: as `stream` takes it. Raises
        BackendError."""
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return self.stream(body, **options)

    def stream(
        self,
        body: Mapping[str, Any],
        *,
        on_piece: Callable[[int], None] | None = None,
        stop_after: int | None = None,
    ) -> StreamedAnswer:
        """POST `body` with stream=true, and read the answer to its end or until `stop_after`
        pieces.

        The path is /completions for a body with a `prompt`, else /chat/completions. Raises
        BackendError if the reply is no text.
        """
        path = "/completions" if "prompt" in body else "/chat/completions"
        stream_options = {"stream": True, "stream_options": {"include_usage": True}}
        while True:
            fields = {name: value for name, value in body.items() if name not in self.refused}
            fields = {"model": self.model, **fields, **stream_options}
            started_s = time.perf_counter()
            try:
                with self._client.stream("POST", self._address(path), json=fields) as response:
                    if response.status_code == 200:
                        return _read_stream(self.name, response, started_s, on_piece, stop_after)
                    reply = _read_whole(response)
            except (httpx.HTTPError, ValueError, MalformedError) as e:
                raise self._failed(e) from e
            refusal = reply.excerpt(2000)
            refused_now = {name for name in _OPTIONAL_FIELDS if name in fields and name in refusal}
            if reply.status not in (400, 422) or not refused_now:
                message = f"{self.name} answered {reply.status} to {path}: {refusal[:300]}"
                raise BackendError(message, hint=self.url)
            self.refused |= refused_now

    def post(self, address: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that a POST to `address` (complete) brings. Raises BackendError."""
        return self._object(address, self._ask("POST", address, body)).members()

    def models(self) -> list[str]:
        """The ids of /models; waits for a server that is loading. Raises BackendError."""
        deadline_s = time.monotonic() + _LOADING_TIMEOUT_S
        address = self._address("/models")
        reply = self._ask("GET", address)
        while reply.status == 503 and time.monotonic() < deadline_s:
            time.sleep(0.1)
            reply = self._ask("GET", address)
        try:
            entries = self._object(address, reply).get("data").items()
            ids = [entry.get("id").text() for entry in entries]
        except MalformedError as e:
            raise self._failed(e) from e
        return [model for model in ids if model]

    def wait_ready(self, timeout_s: float = _LOADING_TIMEOUT_S) -> None:
        """Wait until the server has answered one token. Raises BackendError if it does not within
        `timeout_s` seconds, and at once if it rejects the request."""
        deadline_s = time.monotonic() + timeout_s
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 1,
        }
        while True:
            try:
                reply = self._ask("POST", self._address("/chat/completions"), body)
            except BackendError:
                if time.monotonic() > deadline_s:
                    raise
            else:
                if reply.status == 200:
                    return
                if 400 <= reply.status < 500 or time.monotonic() > deadline_s:
                    raise BackendError(
                        f"{self.name} answered {reply.status} to a one-word chat: "
                        f"{reply.excerpt(300)}",
                        hint=self.url,
                    )
            time.sleep(0.02)

    @cached_property
    def _client(self) -> httpx.Client:
        """A client that opens a connection for each request, as separate programs would, and
        ignores the proxies of the environment."""
        headers = {"accept-encoding": "identity"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(headers=headers, timeout=_TIMEOUT_S, limits=limits, trust_env=False)

    def _address(self, path: str) -> str:
        return self.url.rstrip("/") + path

    def _ask(self, method: str, address: str, body: Mapping[str, Any] | None = None) -> _Reply:
        try:
            with self._client.stream(method, address, json=body) as response:
                return _read_whole(response)
        except (httpx.HTTPError, MalformedError) as e:
            raise self._failed(e) from e

    def _object(self, address: str, reply: _Reply) -> JsonPart:
        """The reply's JSON object. Raises BackendError."""
        path = httpx.URL(address).path
        if reply.status != 200:
            raise BackendError(f"{self.name} answered {reply.status} to {path}", hint=self.url)
        try:
            body = parse(reply.body)
        except MalformedError as e:
            raise self._failed(e) from e
        if not isinstance(body.value, dict):
            raise self._failed(body.wrong("an object"))
        return body

    def _failed(self, cause: Exception) -> BackendError:
        problem = "did not answer"
        if isinstance(cause, MalformedError):
            problem = "sent a malformed answer"
        reason = str(cause) or type(cause).__name__
        return BackendError(f"{self.name} {problem}: {reason}", hint=self.url)


def _read_whole(response: httpx.Response) -> _Reply:
    """Read a reply to its end. Raises MalformedError if it is compressed or too large."""
    check_uncompressed(response.headers.get("content-encoding"))
    return _Reply(response.status_code, read(response.iter_bytes()))


def _read_stream(
    name: str,
    response: httpx.Response,
    started_s: float,
    on_piece: Callable[[int], None] | None,
    stop_after: int | None,
) -> StreamedAnswer:
    answer = StreamedAnswer()
    last_s = started_s
    n_pieces = 0
    check_uncompressed(response.headers.get("content-encoding"))
    for chunk in _chunks(response):
        error = chunk.get("error").value
        if error:
            raise BackendError(f"{name} ended the stream early: {str(error)[:300]}")
        answer.usage = chunk.get("usage").members() or answer.usage
        text = _text(chunk)
        if not text:
            continue
        now_s = time.perf_counter()
        if n_pieces:
            answer.gaps_s.append(now_s - last_s)
            answer.later.append(text)
        else:
            answer.ttft_s = now_s - started_s
            answer.first_at_s = now_s
        last_s = now_s
        n_pieces += 1
        answer.text += text
        if on_piece is not None:
            on_piece(n_pieces)
        if n_pieces == stop_after:
            break
    return answer


def _chunks(response: httpx.Response) -> Iterator[JsonPart]:
    """The objects of a stream. Raises MalformedError."""
    buffer = sse.LineBuffer()
    for piece in response.iter_bytes():
        yield from sse.objects(buffer.feed(piece))
    yield from sse.objects(buffer.end())


def _text(chunk: JsonPart) -> str:
    """The text of one event, including reasoning, because it takes as much time. Raises
    MalformedError."""
    choice = next(chunk.get("choices").items(), JsonPart(None))
    delta = choice.get("delta")
    return (
        choice.get("text").piece()
        or delta.get("content").piece()
        or delta.get("reasoning_content").piece()
        or delta.get("reasoning").piece()
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
