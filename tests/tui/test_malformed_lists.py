"""A server may list its models in any way.

The chat reads the list, or refuses it with one sentence, within a memory limit.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from localllm.cli.chat.engines import engine_at
from localllm.errors import LocalLLMError
from localllm_tui.control.client import ChatClient, ListedModel
from localllm_tui.control.physics import panel_lines
from support.malformed_listings import MOST_BYTES, bomb, listings, mark
from support.raw_server import answering
from tui.test_glass import PHYSICS

MODEL = {"id": "m", "context_length": 4096, "physics": PHYSICS}
FIELDS = ("id", "context_length", "meta", "physics", "notice", "sampling", "has_system")
MORE = ("aliases", "capabilities", "status")
PLACES: dict[str, Any] = {
    "listing": mark(),
    "data": {"data": mark()},
    "entry": {"data": [mark()]},
    **{field: {"data": [{**MODEL, field: mark()}]} for field in (*FIELDS, *MORE)},
    **{
        f"physics {field}": {"data": [{**MODEL, "physics": {**PHYSICS, field: mark()}}]}
        for field in PHYSICS
    },
    "points": {"data": [{**MODEL, "physics": {**PHYSICS, "kv_read_bytes": [[0, mark()]]}}]},
    "memory": {"data": [{**MODEL, "physics": {**PHYSICS, "memory": {"total_bytes": mark()}}}]},
    "state": {"data": [{**MODEL, "status": {"value": mark()}}]},
}
ALL = [*listings(PLACES)]


@contextmanager
def bounded() -> Iterator[None]:
    """Allow a LocalLLMError, and at most MOST_BYTES of memory."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield
    except LocalLLMError as e:
        assert len(e.message.encode()) < 1000  # noqa: PT017
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak - before < MOST_BYTES


async def _listed(url: str) -> list[ListedModel]:
    async with ChatClient(url) as client:
        await client.model("m")
        return await client.models()


@pytest.mark.parametrize(("name", "body"), ALL, ids=[name for name, _ in ALL])
def test_a_malformed_list_of_models_is_read_or_refused_with_a_short_error(
    name: str, body: Any
) -> None:
    with answering(body()) as url:
        with bounded():
            engine_at(f"{url}/v1", None, None)
        with bounded():
            for model in asyncio.run(_listed(f"{url}/v1")):
                for text in (model.name, model.notice, *panel_lines(model.physics, None)):
                    text.encode()


def test_a_compressed_list_is_refused() -> None:
    with (
        answering(bomb(), {"Content-Encoding": "gzip"}) as url,
        pytest.raises(LocalLLMError, match="it is compressed"),
    ):
        asyncio.run(_listed(f"{url}/v1"))
