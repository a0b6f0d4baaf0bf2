"""A real server on a loopback port for as long as a test runs, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from localllm.server.app import create_app
from localllm.server.http.run import serve_on
from localllm.server.http.settings import ServerSettings
from localllm.server.http.sockets import bind
from localllm.server.models.router import ModelRouter, ServedModel


class Running:
    """Where it listens: `url` without a path, `port`, and the app behind it."""

    def __init__(self, port: int, app: Any) -> None:
        self.port = port
        self.app = app
        self.url = f"http://127.0.0.1:{port}"


@contextmanager
def running_server(models: ModelRouter | dict[str, Any] | list[ServedModel], **settings: Any) -> Iterator[Running]:
    """Serve `models` until the block ends."""
    router = models if isinstance(models, ModelRouter) else ModelRouter(models)
    sock = bind("127.0.0.1", 0)
    limits = ServerSettings(port=sock.getsockname()[1], **settings)
    app = create_app(router, settings=limits)
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve_on(app, sock, limits, quiet=True))

    def serve() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        finally:
            loop.run_until_complete(router.close())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Running(sock.getsockname()[1], app)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(timeout=20)
        assert not thread.is_alive(), "the server did not stop"
