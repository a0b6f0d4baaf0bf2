"""A real server on a loopback port for the duration of a test, in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from localllm.server.app import create_app
from localllm.server.http.peer_user import reports_users
from localllm.server.http.run import serve_on
from localllm.server.http.settings import ServerSettings
from localllm.server.http.sockets import bind
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.served import ModelStore


class Running:
    """A running server: its `url` without a path, its `port` and its app. `stop` ends it before the
    block does."""

    def __init__(self, port: int, app: Any, stop: Callable[[], object]) -> None:
        self.stop = stop
        self.port = port
        self.app = app
        self.url = f"http://127.0.0.1:{port}"


@contextmanager
def running_server(
    models: ModelRouter | dict[str, Any] | list[ServedModel],
    *,
    preload: bool = False,
    store: ModelStore | None = None,
    quiet: bool = True,
    port: int = 0,
    **settings: Any,
) -> Iterator[Running]:
    """Serve `models` until the block ends. With `preload` they start to load at once, as with the
    command.
    `store`: the store into which clients may download models and from which they may remove them.
    Without `quiet`, the server logs like a service. `port`: 0 for a free one."""
    router = models if isinstance(models, ModelRouter) else ModelRouter(models)
    # All of localhost if requested; never an address that other machines can reach.
    socks = bind("localhost" if settings.get("host") == "localhost" else "127.0.0.1", port)
    port = socks[0].getsockname()[1]
    settings.setdefault("allow_users", not reports_users())
    limits = ServerSettings(port=port, **settings)
    app = create_app(router, settings=limits, store=store)
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve_on(app, socks, limits, quiet=quiet))

    def serve() -> None:
        asyncio.set_event_loop(loop)
        if preload:
            first = loop.create_task(router.preload())
            first.add_done_callback(lambda done: done.cancelled() or done.exception())
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
        yield Running(port, app, lambda: loop.call_soon_threadsafe(task.cancel))
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)
        thread.join(timeout=20)
        assert not thread.is_alive(), "the server did not stop"
