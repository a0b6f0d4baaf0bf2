"""`localllm serve --pool URL …`: the front of several servers, which loads no model itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from localllm.errors import UsageError

if TYPE_CHECKING:
    import socket

    from localllm.server.http.settings import ServerSettings
    from localllm.server.proxy.pool import PoolNode
    from localllm.settings import Settings


def check_pool(settings: Settings, named: Sequence[str]) -> None:
    """Raises UsageError for a pool that is given models to load, and for addresses that are
    none."""
    if not settings.value("pool"):
        return
    if named:
        raise UsageError(
            "--pool loads no model: the servers behind it do", hint=f"leave {named[0]} out"
        )
    nodes(settings)


def nodes(settings: Settings) -> list[PoolNode]:
    """The servers of the pool, each under its host and port. Raises UsageError."""
    from urllib.parse import urlsplit

    from localllm.cli.serve.upstreams import checked_url
    from localllm.server.proxy.pool import PoolNode

    found: dict[str, PoolNode] = {}
    for text in settings.value("pool"):
        # Whoever named it on the command line, or as a setting, allowed it.
        host = (urlsplit(text).hostname or "").lower()
        url = checked_url(
            text, [host], "--pool", keyed=settings.value("pool_key") is not None
        ).removesuffix("/v1")
        name = urlsplit(url).netloc
        if name in found:
            raise UsageError(f"--pool names {name} twice")
        found[name] = PoolNode(name, url)
    return [*found.values()]


async def serve_pool(
    settings: Settings,
    secured: ServerSettings,
    socks: Sequence[socket.socket],
    address: str,
    *,
    quiet: bool,
) -> None:
    """Serve the pool on `socks` until cancelled, and say on stderr where, unless `quiet`."""
    import gc
    import sys

    from localllm.cli.serve.run import stop_when_terminated
    from localllm.server.http.run import serve_on
    from localllm.server.proxy.pool import create_pool_app

    gc.enable()
    stop_when_terminated()
    app, front = create_pool_app(nodes(settings), secured, settings.value("pool_key"))
    if secured.generated_key:
        print(
            f"API key (this address can be reached from other machines): {secured.api_key}",
            file=sys.stderr,
        )
    if not quiet:
        print(
            f"serving {len(front.nodes)} servers on {address}  (Ctrl-C stops)",
            file=sys.stderr,
            flush=True,
        )
    try:
        await serve_on(app, socks, secured)
    finally:
        await front.close()
