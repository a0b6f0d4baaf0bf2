"""The tokens that the server counts for the chat are those that the engine then reads.

A real model is used, with and without an answer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from localllm.cli.chat.own_server import OwnEngine
from localllm_tui.control.client import ChatClient
from localllm_tui.control.stream_events import (
    AnswerDone,
)
from support.own_server import background_server

ASKED = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Count to five."}]
STOPPED = [*ASKED, {"role": "assistant", "content": "One, two,"}]


@pytest.mark.timeout(300)
def test_a_count_is_the_prompt_that_the_engine_reads(smollm2: Path) -> None:
    async def both(client: ChatClient, name: str, continues: bool) -> tuple[int | None, int]:
        messages = STOPPED if continues else ASKED
        counted = await client.count(name, messages)
        events = [event async for event in client.stream(name, messages, continues=continues)]
        done = events[-1]
        assert isinstance(done, AnswerDone)
        assert done.usage is not None
        return counted, done.usage.prompt

    async def main(engine: OwnEngine) -> None:
        async with ChatClient(
            engine.base_url, engine.api_key, sampling={"temperature": 0, "max_tokens": 2}
        ) as client:
            for continues in (False, True):
                counted, read = await both(client, engine.model, continues)
                assert counted == read

    with background_server(str(smollm2), 512) as engine:
        asyncio.run(main(engine))
