"""`localllm serve`: the OpenAI-compatible endpoint; and the same server in the background for `localllm chat`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import asyncio

    from localllm.engine.supervisor import Supervisor


def serve(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="What to serve.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default 11535).")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must send.")] = None,
    context: Annotated[int | None, typer.Option(help="Served context in tokens (default: what fits).")] = None,
    kv_type: Annotated[str | None, typer.Option(help="KV cache: auto, f16, q8_0 or q4_0.")] = None,
    draft: Annotated[str | None, typer.Option(help="Drafting: auto, off, ngram or a MODEL.")] = None,
    backend: Annotated[str | None, typer.Option(help="Engine: auto, llamacpp or mlx.")] = None,
    parallel: Annotated[int | None, typer.Option(help="Requests served at once (default 8).")] = None,
    offline: Annotated[bool | None, typer.Option("--offline", help="Never contact the hub.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint on this machine (loopback only unless --host says otherwise)."""
    import asyncio
    import sys

    from localllm.cli.launch import prepare
    from localllm.server.app import create_app
    from localllm.server.idle import memory_is_short, unload_idle
    from localllm.server.router import ModelRouter
    from localllm.server.run import bind, serve_on
    from localllm.server.settings import ServerSettings
    from localllm.settings import Settings

    flags = {
        "host": host, "port": port, "api_key": api_key, "context": context, "kv_type": kv_type, "draft": draft,
        "backend": backend, "parallel": parallel, "offline": offline,
    }  # fmt: skip
    settings = Settings(flags)
    server_settings = ServerSettings.secure(
        host=settings.value("host"), port=settings.value("port"), api_key=settings.value("api_key")
    )
    # The port is taken before anything loads: a minute of loading must not end in "address in use".
    sock = bind(server_settings.host, server_settings.port)
    references: list[str | None] = [*models] if models else [None]
    launches = [prepare(reference, settings, "coding") for reference in references]

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    async def main() -> None:
        from localllm.engine.supervisor import Supervisor

        supervisors = {launch.name: Supervisor(launch.options) for launch in launches}
        router = ModelRouter(supervisors)
        for launch in launches:
            say(f"loading {launch.name} …")
            engine = await router.resolve(launch.name).engine()
            say(f"  context {engine.info.n_ctx:,} tokens, {_allocated(supervisors[launch.name]):.2f} GB allocated")
        port_now = sock.getsockname()[1]
        say(f"serving on http://{server_settings.host}:{port_now}/v1  (Ctrl-C stops)")
        if server_settings.generated_key:
            say(f"API key (this address can be reached from other machines): {server_settings.api_key}")
        idle_s = 60.0 * settings.value("idle_unload_min")
        watch = asyncio.create_task(unload_idle(router, idle_s=idle_s, pressed=memory_is_short)) if idle_s > 0 else None
        try:
            await serve_on(create_app(router, settings=server_settings), sock)
        finally:
            if watch is not None:
                watch.cancel()
            await router.close()

    asyncio.run(main())


@contextmanager
def background_server(model: str | None, context: int | None = None) -> Iterator[tuple[str, str]]:
    """A server for as long as the block runs, on a free loopback port: yields (base_url, model name).

    Loads the model before yielding, saying so on stderr when it takes over a second.
    """
    import asyncio
    import threading

    from localllm.cli.launch import prepare
    from localllm.cli.progress import loading_note
    from localllm.engine.supervisor import Supervisor
    from localllm.server.app import create_app
    from localllm.server.router import ModelRouter
    from localllm.server.run import bind, serve_on
    from localllm.server.settings import ServerSettings
    from localllm.settings import Settings

    settings = Settings({"context": context})
    launch = prepare(model, settings)
    server_settings = ServerSettings.secure(host="127.0.0.1", port=0, api_key=None)
    sock = bind("127.0.0.1", 0)
    ready = threading.Event()
    failures: list[BaseException] = []
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    with loading_note(launch.name) as note:

        async def main() -> None:
            supervisor = Supervisor(launch.options, note)
            router = ModelRouter({launch.name: supervisor})
            try:
                await router.resolve(launch.name).engine()
                ready.set()
                await serve_on(create_app(router, settings=server_settings), sock, quiet=True)
            finally:
                await router.close()

        def run() -> None:
            loop = asyncio.new_event_loop()
            task = loop.create_task(main())
            stop.append((loop, task))
            try:
                loop.run_until_complete(task)
            except asyncio.CancelledError:
                pass
            except BaseException as e:
                failures.append(e)
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()
                sock.close()
                ready.set()

        thread = threading.Thread(target=run, name="server", daemon=True)
        thread.start()
        try:
            ready.wait()
        except KeyboardInterrupt:
            _cancel(stop)
            raise
    if failures:
        raise failures[0]
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1", launch.name
    finally:
        _cancel(stop)
        thread.join(timeout=10)


def _allocated(supervisor: Supervisor) -> float:
    """GB the worker's model and context take."""
    client = supervisor.client
    return client.memory.total_bytes / 1e9 if client is not None else 0.0


def _cancel(stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]]) -> None:
    for loop, task in stop:
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)
