"""`localllm serve --pool URL …`: a front end for several servers that loads no model itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from localllm.cli.serve.listening import access_text, key_notice, listening, port_of
from localllm.cli.serve.run import stop_when_terminated
from localllm.cli.serve.running import published
from localllm.cli.serve.upstreams import checked_url
from localllm.engine.worker.pipe import end_ahead
from localllm.errors import UsageError
from localllm.server.http.run import serve_on
from localllm.server.http.settings import ServerSettings
from localllm.server.proxy.pool import PoolFront, PoolNode
from localllm.settings import Settings


async def serve_pool(
    settings: Settings, secured: ServerSettings, named: Sequence[str], *, quiet: bool
) -> None:
    """Serve the pool until cancelled. Print its address on stderr unless `quiet`.

    Raises UsageError if models are `named`, or if an address is invalid.
    """
    if named:
        raise UsageError("--pool loads no model itself; its servers do", hint=f"omit {named[0]}")
    servers = nodes(settings)
    await end_ahead()
    with listening(secured) as (socks, address), published(secured, port_of(socks)):
        gc.enable()
        stop_when_terminated()
        pool_front = PoolFront(servers, secured, settings.value("pool_key"))
        if secured.generated_key:
            print(key_notice(secured), file=sys.stderr)
        if not quiet:
            text = f"serving {len(servers)} server(s) on {address}  (Ctrl-C stops)"
            print(f"{text}\n  {access_text(secured)}", file=sys.stderr, flush=True)
        try:
            await serve_on(pool_front.app, socks, secured)
        finally:
            await pool_front.http.close()


def nodes(settings: Settings) -> list[PoolNode]:
    """Return the servers of the pool, each named by host and port. Raises UsageError."""
    nodes_by_name: dict[str, PoolNode] = {}
    for text in settings.value("pool"):
        # A host on the command line or in a setting is allowed.
        host = (urlsplit(text).hostname or "").lower()
        url = checked_url(
            text, [host], "--pool", keyed=settings.value("pool_key") is not None
        ).removesuffix("/v1")
        name = urlsplit(url).netloc
        if name in nodes_by_name:
            raise UsageError(f"--pool names {name} twice")
        nodes_by_name[name] = PoolNode(name, url)
    return [*nodes_by_name.values()]
