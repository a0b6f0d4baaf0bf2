"""The chat's client of a server: complete and broken streams, errors, and disconnecting."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import ContextLengthError, LocalLLMError, WorkerDiedError
from localllm_tui.control.client import ChatClient, ListedModel, ServerUnreachableError
from localllm_tui.control.stream_events import (
    AnswerDone,
    AnswerUsage,
    PromptProgress,
    TextDelta,
    WaitNote,
)
from tui.scripted_sse import Comment, Drop, Finish, Raw, Refuse, Say, ScriptedServer, UntilGone

ASK = [{"role": "user", "content": "hi"}]


def collect(client: ChatClient) -> list[Any]:
    async def main() -> list[Any]:
        async with client:
            return [event async for event in client.stream("m", ASK)]

    return asyncio.run(main())


def test_a_complete_stream_is_read(server: ScriptedServer) -> None:
    server.play(
        Comment("loading"),
        Comment("prefill 512/2048 tokens, 0 cached"),
        Comment("ping"),
        Say(["hm"], field="reasoning_content"),
        Say(["Hello", " you"]),
        Comment("cache 3/11 tokens; the prompts part at token 3"),
        Finish(usage=(11, 2, 3)),
    )
    assert collect(ChatClient(server.base_url, sampling={"temperature": 0})) == [
        WaitNote("loading the model"),
        PromptProgress(512, 2048),
        TextDelta("", "hm"),
        TextDelta("Hello"),
        TextDelta(" you"),
        AnswerDone("stop", AnswerUsage(11, 2, 3), "the prompts part at token 3"),
    ]
    sent = server.requests[0]
    assert (sent["model"], sent["messages"], sent["stream"], sent["temperature"]) == (
        "m",
        ASK,
        True,
        0,
    )


def test_a_line_separator_inside_the_text_is_text(server: ScriptedServer) -> None:
    server.play(Say(["a\u2028b\x85c\x0bd"]), Finish())
    assert collect(ChatClient(server.base_url))[0] == TextDelta("a\u2028b\x85c\x0bd")


def test_carriage_returns_and_a_missing_usage_are_fine(server: ScriptedServer) -> None:
    chunk = json.dumps(
        {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}]}
    )
    server.play(Raw(f"event: message\r\ndata: {chunk}\r\n\r\ndata:[DONE]\r\n\r\n".encode()))
    assert collect(ChatClient(server.base_url)) == [TextDelta("x"), AnswerDone("length", None)]


class Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> Any:
        for piece in self.pieces:
            yield piece


@given(st.text(min_size=1), st.lists(st.integers(1, 7), min_size=1))
def test_the_text_is_the_same_with_any_division_of_the_bytes(text: str, sizes: list[int]) -> None:
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": c}, "finish_reason": None}]} for c in text
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    data = "".join(f"data: {json.dumps(c, ensure_ascii=False)}\n\n" for c in chunks).encode(
        "utf-8", "surrogatepass"
    )
    pieces = []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Pieces(pieces)))
    events = collect(ChatClient("http://test/v1", transport=transport))
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == text
    assert events[-1] == AnswerDone("stop", None)


def test_a_refusal_becomes_the_error_it_names(server: ScriptedServer) -> None:
    server.play(
        Refuse(
            400, {"message": "too long", "code": "context_length_exceeded", "hint": "shorten it"}
        )
    )
    with pytest.raises(ContextLengthError, match="too long") as refused:
        collect(ChatClient(server.base_url))
    assert refused.value.hint == "shorten it"


def test_a_refusal_without_our_error_format_is_shown_with_its_status() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(502, text="bad gateway"))
    with pytest.raises(LocalLLMError, match="502: bad gateway"):
        collect(ChatClient("http://test/v1", transport=transport))


def test_an_error_inside_the_stream_is_raised_after_the_text(server: ScriptedServer) -> None:
    error = {"error": {"message": "the worker died", "code": "worker_died"}}
    server.play(Say(["a"]), Raw(f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()))
    seen: list[Any] = []

    async def main() -> None:
        async with ChatClient(server.base_url) as client:
            async for event in client.stream("m", ASK):
                seen.append(event)

    with pytest.raises(WorkerDiedError):
        asyncio.run(main())
    assert seen == [TextDelta("a")]


@pytest.mark.parametrize("end", [Drop(), Raw(b"data: [DONE]\n\n"), Raw(b"data: {nonsense\n\n")])
def test_a_stream_that_ends_too_early_is_an_error(server: ScriptedServer, end: Any) -> None:
    server.play(Say(["a"]), end)
    with pytest.raises(ServerUnreachableError):
        collect(ChatClient(server.base_url))


def test_a_server_that_is_not_running_is_an_error_with_a_hint(server: ScriptedServer) -> None:
    with ScriptedServer() as gone:
        pass
    with pytest.raises(ServerUnreachableError) as error:
        collect(ChatClient(gone.base_url))
    assert error.value.hint


def test_closing_the_stream_closes_the_connection(server: ScriptedServer) -> None:
    until_gone = UntilGone()
    server.play(Say(["a"]), until_gone)

    async def main() -> None:
        async with (
            ChatClient(server.base_url) as client,
            aclosing(client.stream("m", ASK)) as stream,
        ):
            assert await anext(stream) == TextDelta("a")

    asyncio.run(main())
    assert until_gone.gone.wait(60)


def test_a_proxy_in_the_environment_is_not_used(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.answer("direct")
    assert collect(ChatClient(server.base_url))[0] == TextDelta("direct")


@pytest.mark.parametrize(
    ("entry", "n_ctx"),
    [
        ({"id": "m", "context_length": 8192}, 8192),
        ({"id": "m", "meta": {"n_ctx": 4096}}, 4096),
        ({"id": "m", "max_model_len": 2048}, 2048),
        ({"id": "m", "context_length": None}, None),
        ({"id": "m"}, None),
    ],
)
def test_the_context_length_is_read_under_each_of_its_names(
    entry: dict[str, Any], n_ctx: int | None
) -> None:
    async def main() -> list[ListedModel]:
        async with listing([entry]) as client:
            return await client.models()

    assert asyncio.run(main()) == [ListedModel("m", n_ctx)]


def listing(entries: list[dict[str, Any]]) -> ChatClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"data": entries}))
    return ChatClient("http://test/v1", transport=transport)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://localhost:8080/v1", True),
        ("http://127.0.0.2:8080/v1", True),
        ("http://[::1]:8080/v1", True),
        ("http://localhost.localdomain/v1", True),
        ("https://example.org/v1", False),
        ("http://10.0.0.7:8080/v1", False),
    ],
)
def test_a_local_server_is_recognised_by_its_address(url: str, local: bool) -> None:
    assert ChatClient(url).is_local is local


def test_the_key_is_sent() -> None:
    keys: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers.get("Authorization"))
        return httpx.Response(200, json={"data": []})

    async def main() -> None:
        async with ChatClient(
            "http://test/v1", api_key="k", transport=httpx.MockTransport(answer)
        ) as client:
            await client.models()

    asyncio.run(main())
    assert keys == ["Bearer k"]
