"""`localllm serve`: the OpenAI-compatible endpoint; and the same server in the background for `localllm chat`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.errors import UsageError

if TYPE_CHECKING:
    import asyncio
    import socket

    from fastapi import FastAPI

    from localllm.cli.launch import Launch
    from localllm.server.http.settings import ServerSettings
    from localllm.server.models.router import ModelRouter, ServedModel

_GB = "{:.2f} GB"


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="What to serve: several share the machine, or take turns."),
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="One more model, for example for autocomplete.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MODEL", help="Another name that clients may use (repeatable).")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default 11535).")] = None,
    unix: Annotated[
        str | None, typer.Option("--unix", metavar="PATH", help="Listen on a Unix socket instead of a port.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must send.")] = None,
    context: Annotated[int | None, typer.Option(help="Served context in tokens (default: what fits).")] = None,
    kv_type: Annotated[str | None, typer.Option(help="KV cache: auto, f16, q8_0 or q4_0.")] = None,
    draft: Annotated[str | None, typer.Option(help="Drafting: auto, off, ngram, mtp or a MODEL.")] = None,
    backend: Annotated[str | None, typer.Option(help="Engine: auto, llamacpp or mlx.")] = None,
    parallel: Annotated[int | None, typer.Option(help="Requests served at once (default 8).")] = None,
    offline: Annotated[bool | None, typer.Option("--offline", help="Never contact the hub.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint on this machine (loopback only unless --host says otherwise).

    Several models share the machine when they fit together; else the longest unused one makes room.
    """
    import asyncio

    from localllm.cli.launch import prepare_all
    from localllm.server.http.settings import ServerSettings
    from localllm.settings import Settings

    flags = {
        "host": host, "port": port, "unix_socket": unix, "api_key": api_key, "context": context, "kv_type": kv_type,
        "draft": draft, "backend": backend, "parallel": parallel, "offline": offline,
    }  # fmt: skip
    settings = Settings(flags)
    server_settings = ServerSettings.secure(
        host=settings.value("host"),
        port=settings.value("port"),
        api_key=settings.value("api_key"),
        unix_socket=settings.value("unix_socket"),
    )
    # The port is taken before anything loads: a minute of loading must not end in "address in use".
    with listening(server_settings) as (sock, address):
        launches = prepare_all([*(models or []), *(also or [])] or [None], settings)
        router = router_for(launches, _aliases(alias or [], launches))
        idle_s = 60.0 * settings.value("idle_unload_min")
        with suppress(asyncio.CancelledError):
            asyncio.run(_serve_until_stopped(router, server_settings, sock, address, idle_s=idle_s, quiet=quiet))


async def _serve_until_stopped(
    router: ModelRouter, settings: ServerSettings, sock: socket.socket, address: str, *, idle_s: float, quiet: bool
) -> None:
    """Load the models, say so on stderr unless `quiet`, and serve; models idle for `idle_s` are unloaded (0: never)."""
    import asyncio
    import sys

    from localllm.server.models.idle import memory_is_short, unload_idle

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    _stop_when_terminated()
    say(f"loading {', '.join(model.name for model in router.list())} …")
    serving = asyncio.create_task(asyncio.to_thread(_serving, router, settings))
    waiting = await router.preload()
    for model in router.list():
        if model in waiting:
            say(f"  {model.name} is loaded when asked for: {_GB.format(model.needs_bytes / 1e9)} do not fit now")
        else:
            say(f"  {model.name}: context {model.served_n_ctx:,} tokens, {_allocated(model)} allocated")
    say(f"serving on {address}  (Ctrl-C stops)")
    if settings.generated_key:
        say(f"API key (this address can be reached from other machines): {settings.api_key}")
    watch = asyncio.create_task(unload_idle(router, idle_s=idle_s, pressed=memory_is_short)) if idle_s > 0 else None
    try:
        app, serve_on = await serving
        await serve_on(app, sock, settings)
    finally:
        if watch is not None:
            watch.cancel()
        await router.close()


def _serving(router: ModelRouter, settings: ServerSettings) -> tuple[FastAPI, Callable[..., Awaitable[None]]]:
    """The application and what serves it. Reading that code takes as long as a small model takes to load: this runs
    meanwhile."""
    import gc

    # All of it stays: to look through it for garbage costs a tenth of the time now, and streams a pause later.
    gc.disable()
    try:
        from localllm.server.app import create_app
        from localllm.server.http.run import serve_on

        return create_app(router, settings=settings), serve_on
    finally:
        gc.freeze()
        gc.enable()


def _stop_when_terminated() -> None:
    """SIGTERM (kill, launchd, containers) ends the server as Ctrl-C does: streams get their end, workers are closed."""
    import asyncio
    import signal

    task = asyncio.current_task()
    assert task is not None
    with suppress(NotImplementedError):  # Windows has no such signal
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


@contextmanager
def listening(settings: ServerSettings) -> Iterator[tuple[socket.socket, str]]:
    """The listening socket of `settings` and its address for people; a Unix socket's file goes with it.

    Raises PortInUseError or UsageError."""
    from pathlib import Path

    from localllm.server.http.sockets import bind, bind_unix

    if settings.unix_socket is None:
        sock = bind(settings.host, settings.port)
        with sock:
            yield sock, f"http://{settings.host}:{sock.getsockname()[1]}/v1"
        return
    path = Path(settings.unix_socket).expanduser()
    sock = bind_unix(path)
    try:
        with sock:
            yield sock, f"the Unix socket {path} (path /v1)"
    finally:
        path.unlink(missing_ok=True)


def router_for(launches: Sequence[Launch], aliases: Mapping[str, str] | None = None) -> ModelRouter:
    """The models of `launches` behind one door, with the memory of this machine as their limit. `aliases`: further
    names, each to a launch's name."""
    from localllm.cli.launch import memory_for_models, own_sampling
    from localllm.engine.supervisor import Supervisor
    from localllm.server.models.admission import ModelAdmission
    from localllm.server.models.router import ModelRouter, ServedModel

    names = [launch.name for launch in launches]
    if len(set(names)) < len(names):
        raise UsageError("the same model is named twice", hint=f"named: {', '.join(names)}")
    served = [
        ServedModel(
            launch.name,
            Supervisor(launch.options) if launch.embedding is None else Supervisor(launch.embedding),
            aliases=tuple(a for a, name in (aliases or {}).items() if name == launch.name),
            sampling=own_sampling(launch.plan),
            n_ctx=launch.plan.settings.n_ctx if launch.plan is not None else None,
            details=_details(launch),
            embeds=launch.embedding is not None,
            needs_bytes=launch.needs_bytes,
        )
        for launch in launches
    ]
    limit, available = memory_for_models()
    return ModelRouter(served, ModelAdmission(limit, available) if len(served) > 1 else None)


def _details(launch: Launch) -> dict[str, object]:
    """Facts for the lists of models, known before anything is loaded."""
    local, plan = launch.local, launch.plan
    architecture = plan.model.architecture if plan is not None else ""
    return {"format": local.format, "quant": local.quant, "bytes": local.size_bytes, "architecture": architecture}


def _aliases(sent: Sequence[str], launches: Sequence[Launch]) -> dict[str, str]:
    """`NAME=MODEL` texts as a mapping; raises UsageError."""
    names = {launch.name.lower(): launch.name for launch in launches}
    found: dict[str, str] = {}
    for text in sent:
        alias, equals, name = text.partition("=")
        if not equals or not alias or name.lower() not in names:
            raise UsageError(
                f"--alias {text!r} must be NAME=MODEL with a model that is served", hint=f"served: {', '.join(names)}"
            )
        found[alias] = names[name.lower()]
    return found


@contextmanager
def background_server(model: str | None, context: int | None = None) -> Iterator[tuple[str, str]]:
    """A server for as long as the block runs, on a free loopback port: yields (base_url, model name).

    Loads the model before yielding, saying so on stderr when it takes over a second.
    """
    import threading

    from localllm.cli.launch import own_sampling, prepare
    from localllm.cli.progress import loading_note
    from localllm.engine.supervisor import Supervisor
    from localllm.server.http.settings import ServerSettings
    from localllm.server.http.sockets import bind
    from localllm.server.models.router import ModelRouter, ServedModel
    from localllm.settings import Settings

    settings = Settings({"context": context})
    launch = prepare(model, settings)
    if launch.embedding is not None:
        raise UsageError(f"{launch.name} makes embeddings, not text", hint="name a chat model: `localllm models list`")
    server_settings = ServerSettings.secure(host="127.0.0.1", port=0, api_key=None)
    sock = bind("127.0.0.1", 0)
    with loading_note(launch.name) as note:

        def router() -> ModelRouter:
            host = Supervisor(launch.options, note)
            return ModelRouter([ServedModel(launch.name, host, sampling=own_sampling(launch.plan))])

        server = _InBackground(router, launch.name, server_settings, sock)
        thread = threading.Thread(target=server.run, name="server", daemon=True)
        thread.start()
        try:
            server.ready.wait()
        except KeyboardInterrupt:
            server.stop()
            raise
    if server.failure is not None:
        raise server.failure
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1", launch.name
    finally:
        server.stop()
        thread.join(timeout=10)


class _InBackground:
    """One model served on `sock` by an event loop of its own. `ready` is set when the model is loaded, and when it
    failed: then `failure` says why. `router` makes the router, in that loop's thread."""

    def __init__(
        self, router: Callable[[], ModelRouter], name: str, settings: ServerSettings, sock: socket.socket
    ) -> None:
        import threading

        self._router, self._name, self._settings, self._sock = router, name, settings, sock
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self.ready = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Serve until `stop`: the body of the thread."""
        import asyncio

        loop = asyncio.new_event_loop()
        task = loop.create_task(self._serve())
        self._running = loop, task
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        except BaseException as e:
            self.failure = e
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            self._sock.close()
            self.ready.set()

    def stop(self) -> None:
        """End `run`, from any thread."""
        if self._running is not None:
            loop, task = self._running
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

    async def _serve(self) -> None:
        import asyncio

        router = self._router()
        serving = asyncio.create_task(asyncio.to_thread(_serving, router, self._settings))
        try:
            await router.resolve(self._name).engine()
            self.ready.set()
            app, serve_on = await serving
            await serve_on(app, self._sock, self._settings, quiet=True)
        finally:
            serving.cancel()
            await router.close()


def _allocated(model: ServedModel) -> str:
    """What the worker's model and context take; as planned where the worker does not say."""
    client = getattr(model.host, "client", None)
    return _GB.format((client.memory.total_bytes if client is not None else model.needs_bytes) / 1e9)
