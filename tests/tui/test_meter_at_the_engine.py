"""The meter and the glass panel with a real engine.

In every state, the screen shows the values that the server counted and measured.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.cli.chat.own_server import OwnEngine
from localllm.conversation.history import History
from localllm_tui.app import ChatApp
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.stream_events import (
    AnswerDone,
    StreamEvent,
)
from support.own_server import background_server
from tui.conftest import Driver

CONTEXT = 1024


class Recording(ChatClient):
    """A client that records how the server ended each answer."""

    ends: list[AnswerDone]

    async def stream(self, *args: Any, **options: Any) -> AsyncGenerator[StreamEvent, None]:
        async for event in super().stream(*args, **options):
            if isinstance(event, AnswerDone):
                self.ends.append(event)
            yield event


def meter(d: Driver) -> int | None:
    """Return the tokens that the status line shows."""
    found = re.search(r"context ([\d,]+)/", d.screen().splitlines()[-1])
    return int(found[1].replace(",", "")) if found else None


def ended(client: Recording) -> int:
    """Return the tokens that the server counted for the newest answer and its prompt."""
    usage = client.ends[-1].usage
    assert usage is not None
    return usage.prompt + usage.completion


def key_of(engine: OwnEngine) -> dict[str, str]:
    return {"authorization": f"Bearer {engine.api_key}"}


async def counted(engine: OwnEngine, d: Driver) -> int:
    """Return the server's count of the conversation, requested without the chat."""
    body = {"model": engine.model, "input": d.app.chat.session.context()}
    async with httpx.AsyncClient(headers=key_of(engine)) as http:
        said = await http.post(f"{engine.base_url}/responses/input_tokens", json=body, timeout=60)
    return int(said.json()["input_tokens"])


async def in_every_state(engine: OwnEngine, history: History) -> None:
    """Check all states of an answer. The conversation stays, so a test can open it again."""
    async with Recording(
        engine.base_url, engine.api_key, sampling={"temperature": 0, "max_tokens": 12}
    ) as client:
        client.ends = []
        app = ChatApp(ChatOptions(client, history, engine.model), lambda _: True)
        app.chat.idle_after_s = None
        async with app.run_test(size=(160, 40)) as pilot:
            d = Driver(app, pilot)
            await d.until(lambda: app.chat.listed.n_ctx == CONTEXT)
            await d.ask("Count to ten.")
            assert meter(d) == ended(client)
            await d.ask("/retry")
            assert len(client.ends) == 2
            assert meter(d) == ended(client)
            await d.send("/edit")
            app.page.composer.replace_text("Say the names of three colours, please.")
            await d.press("enter")
            await d.until(lambda: len(client.ends) == 3 and not app.chat.answering)
            assert meter(d) == ended(client)
            await d.press("f2", "e")  # the answer
            app.page.composer.replace_text("Red, and some others that I made up.")
            await d.press("enter")
            edited = await counted(engine, d)
            await d.until(lambda: meter(d) == edited)
            app.chat.listed = replace(
                app.chat.listed, n_ctx=None
            )  # otherwise the chat itself would refuse it
            await d.ask("too long " * CONTEXT)
            await d.until(lambda: "Error:" in d.screen())
            await d.ask("/model " + engine.model)
            assert await counted(engine, d) == edited  # a failed question is not sent again
            await d.until(lambda: meter(d) == edited)
            client.sampling["max_tokens"] = 600
            await d.send("Write a long story about the sea.")
            await d.until(
                lambda: app.chat.streaming is not None and app.chat.streaming.text.count(" ") > 5
            )
            await d.press("escape")
            await d.until(lambda: not app.chat.answering)
            assert len(client.ends) == 3
            stopped = await counted(engine, d)
            assert stopped > edited + 5
            await d.until(lambda: meter(d) == stopped)


async def opened_again(engine: OwnEngine, history: History) -> None:
    async with Recording(
        engine.base_url, engine.api_key, sampling={"temperature": 0, "max_tokens": 12}
    ) as client:
        client.ends = []
        app = ChatApp(
            ChatOptions(client, history, engine.model, history.list()[0].id), lambda _: True
        )
        app.chat.idle_after_s = None
        async with app.run_test(size=(160, 40)) as pilot:
            d = Driver(app, pilot)
            stopped = await counted(engine, d)
            await d.until(lambda: meter(d) == stopped)
            await d.ask("/more")
            assert meter(d) == ended(client)
            usage = client.ends[-1].usage
            assert usage is not None
            assert usage.prompt == stopped  # the displayed count equals what the engine then read


async def speed_on_screen(engine: OwnEngine, history: History) -> None:
    async with Recording(
        engine.base_url, engine.api_key, sampling={"temperature": 0, "max_tokens": 24}
    ) as client:
        client.ends = []
        async with httpx.AsyncClient(headers=key_of(engine)) as http:
            listed = (await http.get(f"{engine.base_url}/models")).json()["data"]
        physics = next(m for m in listed if m["id"] == engine.model)["physics"]
        app = ChatApp(ChatOptions(client, history, engine.model), lambda _: True)
        app.chat.idle_after_s = None
        async with app.run_test(size=(120, 50)) as pilot:
            d = Driver(app, pilot)
            await d.until(lambda: app.chat.listed.n_ctx == CONTEXT)
            await d.ask("Count to twenty.")
            await d.press("f3")
            await d.until(lambda: "GB/s: " in d.screen())
            usage, took = client.ends[-1].usage, client.ends[-1].timings
            assert usage is not None
            assert took is not None
            (_, _), *points = physics["kv_read_bytes"]
            # all layers see the whole context, so the bytes grow linearly
            kv_per_token = points[0][1] / points[0][0]
            depth = usage.prompt + usage.completion / 2
            read = sum(physics["weights"].values()) + kv_per_token * depth
            measured = read / (took.decode_s / took.steps) / 1e9
            shown = re.search(r"([\d.]+) of [\d,.]+ GB/s: ", d.screen())
            assert shown is not None
            assert float(shown[1]) == pytest.approx(
                measured, rel=0.1, abs=0.51 if "." not in shown[1] else 0.051
            )
            each = re.search(r"EACH TOKEN READS ([\d.]+) MB", d.screen())
            assert each is not None
            assert float(each[1]) == pytest.approx(read / 1e6, rel=0.1)


@pytest.mark.timeout(300)
def test_the_screen_shows_the_counts_and_measurements_of_the_server(
    smollm2: Path, history: History, tmp_path: Path
) -> None:
    with background_server(str(smollm2), CONTEXT) as engine:
        asyncio.run(in_every_state(engine, history))
        asyncio.run(opened_again(engine, history))
        with History(tmp_path / "other" / "conversations.db") as other:
            asyncio.run(speed_on_screen(engine, other))
            assert len(other.list()) == len(history.list()) == 1
