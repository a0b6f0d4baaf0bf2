"""A chat's own engine, for tests that ask it over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from localllm.cli.chat.own_server import OwnEngine, loaded
from localllm.settings import Settings


@contextmanager
def background_server(model: str, context: int | None = None) -> Iterator[tuple[str, str]]:
    """A server of one's own with a loaded model, for as long as the block runs: yields (base_url,
    model name)."""
    with loaded(OwnEngine(model, Settings({"context": context}))) as engine:
        yield engine.base_url, engine.model
