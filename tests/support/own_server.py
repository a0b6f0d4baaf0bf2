"""A chat's own engine, for tests that use it over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from localllm.cli.chat.own_server import OwnEngine, loaded
from localllm.settings import Settings


@contextmanager
def background_server(model: str, context: int | None = None) -> Iterator[OwnEngine]:
    """Run a server with a loaded model for the duration of the block."""
    with loaded(OwnEngine(model, Settings({"context": context}))) as engine:
        yield engine
