"""Compressed and deeply nested request bodies.

A compressed body is unpacked up to the limit. A body that is nested too deeply is refused and
does not block the server.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.server.http.errors import BodyTooLargeError
from localllm.server.http.json_body import (
    BadJsonError,
    body_memory,
    parse,
    read_json,
    unpack,
)
from localllm.server.http.settings import ServerSettings
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
LIMIT = 200_000


@pytest.fixture(scope="module")
def http():
    with (
        running_server({"tiny": ScriptedEngine()}, max_body_bytes=LIMIT) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def post(http: httpx.Client, body: bytes, encoding: str) -> httpx.Response:
    return http.post(
        CHAT,
        content=body,
        headers={"content-type": "application/json", "content-encoding": encoding},
    )


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("identity", bytes),
        ("gzip", lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:])),
    ],
)
def test_a_compressed_body_is_read(http: httpx.Client, encoding: str, pack: Any) -> None:
    r = post(http, pack(json.dumps(HI).encode()), encoding)
    assert r.status_code == 200, r.text
    assert r.json()["choices"][0]["message"]["content"] == "Hello world!"


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, raw_deflate])
def test_a_body_that_decompresses_to_too_much_is_refused(http: httpx.Client, pack: Any) -> None:
    encoding = "gzip" if pack is gzip.compress else "deflate"
    bomb = pack(b'{"x": "' + b"a" * 50_000_000 + b'"}')
    assert len(bomb) < LIMIT
    r = post(http, bomb, encoding)
    assert r.status_code == 413
    assert str(LIMIT) in r.json()["error"]["message"]


def test_a_gzip_body_of_many_members_is_read() -> None:
    text = bytes(range(256)) * 1_000
    members = [gzip.compress(text[at : at + 100]) for at in range(0, len(text), 100)]
    assert unpack(b"".join(members), "gzip", len(text)) == text


def test_too_many_members_are_refused() -> None:
    with pytest.raises(BodyTooLargeError, match="members"):
        unpack(gzip.compress(b"") * 1_000_000, "gzip", LIMIT)


@pytest.mark.parametrize("members", [1, 100])
def test_a_compression_bomb_is_never_decompressed_beyond_the_limit(members: int) -> None:
    bomb = gzip.compress(b"a" * (100_000_000 // members)) * members
    tracemalloc.start()
    with pytest.raises(BodyTooLargeError):
        unpack(bomb, "gzip", LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * LIMIT


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (b"not packed at all", "gzip", 400),
        (gzip.compress(json.dumps(HI).encode(), mtime=0)[:-12], "gzip", 400),
        (zlib.compress(json.dumps(HI).encode())[:-6], "deflate", 400),
        (gzip.compress(json.dumps(HI).encode(), mtime=0) + b"more", "gzip", 400),
        (gzip.compress(b"{") + gzip.compress(b"}", mtime=0)[:-12], "gzip", 400),
        (zlib.compress(b"{") + zlib.compress(b"}"), "deflate", 400),
        (b"", "gzip", 400),
        (json.dumps(HI).encode(), "br", 415),
        (json.dumps(HI).encode(), "gzip, gzip", 415),
    ],
)
def test_a_body_that_cannot_be_decompressed_is_refused_with_the_reason(
    http: httpx.Client, body: bytes, encoding: str, status: int
) -> None:
    r = post(http, body, encoding)
    assert r.status_code == status
    error = r.json()["error"]
    assert encoding.partition(",")[0] in error["message"] + error.get("hint", "")


class _Sent:
    """A request whose whole body has arrived."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.headers: dict[str, str] = {}
        self.scope: dict[str, Any] = {}

    async def stream(self) -> AsyncIterator[bytes]:
        yield self._body


def test_a_body_of_many_brackets_does_not_block_the_server() -> None:
    """The body is refused for its depth, which shows only at its end.

    Meanwhile the event loop continues to run.
    """
    body = b'{"x":[' + b"{}," * 49_000 + b"[" * 200 + b"]" * 201 + b"}"

    async def story() -> int:
        turns, done = 0, asyncio.Event()

        async def count() -> None:
            nonlocal turns
            while not done.is_set():
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        before = turns
        limits = ServerSettings()
        with pytest.raises(BadJsonError, match="is nested deeper"), body_memory(limits):
            await read_json(_Sent(body), limits)  # type: ignore[arg-type]
        during = turns - before
        done.set()
        await counting
        return during

    assert asyncio.run(story()) > 10


VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('[]{}"\\,:a\n/\u00e9'), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('[{"\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=40,
)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((_depth(v) for v in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((_depth(v) for v in value), default=0)
    return 0


@given(VALUES, st.booleans())
def test_depth_is_that_of_the_value_whatever_its_strings_hold(value: Any, plain: bool) -> None:
    body = json.dumps({"x": value}, ensure_ascii=plain).encode()
    depth = _depth(value) + 1
    assert parse(body, depth) == {"x": value}
    with pytest.raises(BadJsonError, match="is nested deeper"):
        parse(body, depth - 1)


def test_the_limit_of_depth_is_exact() -> None:
    for depth, fine in ((96, True), (97, False)):
        body = b'{"x":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b',"y":"' + b"[" * 300 + b'"}'
        if fine:
            parse(body)
        else:
            with pytest.raises(BadJsonError, match="96 levels"):
                parse(body)


def test_a_body_of_too_many_parts_is_refused_and_brackets_in_a_text_are_none() -> None:
    limits = ServerSettings()

    def read(body: bytes) -> dict[str, Any]:
        with body_memory(limits):
            return asyncio.run(read_json(_Sent(body), limits))  # type: ignore[arg-type]

    with pytest.raises(BadJsonError, match="50,000 lists and objects"):
        read(b'{"x":[' + b"{}," * 50_000 + b"{}]}")
    assert read(b'{"x":"' + b"{}," * 500_001 + b'"}')["x"].startswith("{},")
