"""Run `localllm serve`: listen at once, load models meanwhile, report the result, stop on a
signal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from localllm.errors import LocalLLMError, ModelFileError
from localllm.formatting import gb
from localllm.server.http.asgi import LOGGED

if TYPE_CHECKING:
    import socket

    from starlette.applications import Starlette

    from localllm.cli.serve.installed_models import LibraryStore
    from localllm.server.http.asgi import App, Message, Receive, Scope, Send
    from localllm.server.http.settings import ServerSettings
    from localllm.server.models.router import ModelRouter, ServedModel


_MAX_NAMED = 5
_IMPORT_DELAY_S = 1.0
# An embedding model has a worker of another kind, so the one started in advance gets no order.
_ORDER_TIMEOUT_S = 0.1


async def serve_until_stopped(
    router: ModelRouter,
    settings: ServerSettings,
    socks: Sequence[socket.socket],
    address: str,
    *,
    store: LibraryStore | None,
    idle_s: float,
    warm: str | None,
    quiet: bool,
) -> None:
    """Listen at once and load the models meanwhile. Progress goes to stderr unless `quiet`.

    Models that are idle for `idle_s` are unloaded (0: never). `store`: a target for downloads that
    clients request. `warm`: the value of --warm. Raises the error of a failed load if no other model can be served, or if all
    named files are damaged.
    """
    from localllm.cli.serve.api_keys import key_path
    from localllm.cli.serve.listening import access_text, key_notice, reachable_address

    def report(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    stop_when_terminated()
    if settings.generated_key:
        # Also with --quiet: clients need the key.
        print(key_notice(settings), file=sys.stderr, flush=True)
        report(f"  it is stored in {key_path()}; --new-key generates a new one")
    if settings.allow_plain and any(key.kv for key in settings.keys):
        report("KV is sent to other machines without encryption (--allow-plain)")
    if router.named:
        names = ", ".join(model.name for model in router.named)
        report(f"loading {names} … requests to {address} wait until it is loaded")
    loading = asyncio.create_task(_load(router, report))
    tasks = [loading]
    try:
        await wait_until_ordered(loading)
        from localllm.cli.serve.decode_speed import DecodeSpeedWatch
        from localllm.memory.guard import memory_is_short
        from localllm.server.models.unloading import unload_idle

        on_event = None if quiet else report
        warm_up_app = partial(_warm_up, loading, warm) if warm else None
        serving = asyncio.create_task(
            _serve(router, settings, socks, store, on_event, loading, warm_up_app)
        )
        unloading = asyncio.create_task(unload_idle(router, idle_s=idle_s, pressed=memory_is_short))
        tasks += [serving, unloading, asyncio.create_task(DecodeSpeedWatch(router, report).run())]
        await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await loading
            report(f"serving on {address}  (Ctrl-C stops)")
            report(f"  {access_text(settings)}")
            if network_address := reachable_address(address):
                report(
                    f"  from another machine: localllm chat --url {network_address} --api-key KEY"
                )
        await serving
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await router.close()


async def wait_until_ordered(loading: asyncio.Task[None]) -> None:
    """Wait until the worker has its order. Importing the server holds the interpreter for a third
    of a second, and the order would wait for it."""
    from localllm.engine.worker.pipe import ordered_ahead

    ordering = asyncio.create_task(ordered_ahead())
    tasks = {loading, ordering}
    try:
        await asyncio.wait(tasks, timeout=_ORDER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ordering.cancel()


async def _load(router: ModelRouter, report: Callable[[str], None]) -> None:
    """Load the models named at the start, and report the results. Failures are always printed.

    Raises only if no other model can be served, or if the named files are damaged, because waiting
    does not repair them.
    """
    from localllm.engine.worker.pipe import end_ahead

    try:
        await router.preload()
    except LocalLLMError as e:
        models_needed = router.list()
        if isinstance(e, ModelFileError):
            models_needed = router.named
        if router.upstreams is None and all(model.worker.failure for model in models_needed):
            raise
    finally:
        await end_ahead()
    holders: dict[int, str] = {}
    for model in router.named:
        failure = model.worker.failure
        if model.loaded:
            holder = holders.setdefault(id(model.worker), model.name)
            report(
                f"  {model.name}: context {model.served_n_ctx:,} tokens, "
                f"{_memory_text(model, holder)}{_media_text(model)}{_engine_text(model)}"
            )
        elif failure is not None:
            # Printed even if quiet.
            print(f"error: {model.name} could not be loaded: {failure.message}", file=sys.stderr)
            if failure.hint:
                print(f"hint: {failure.hint}", file=sys.stderr, flush=True)
        else:
            needs = gb(model.facts.needs_bytes, 2)
            report(f"  {model.name} is loaded on its first request: {needs} do not fit now")
    if router.named and all(model.worker.failure for model in router.named):
        _print_models_left(router)


def _engine_text(model: ServedModel) -> str:
    """Return the engine with its version, the type of the KV cache, the drafter and the
    accelerator."""
    described = model.facts.details.get("runs_on")
    return f"; {described}" if described else ""


def _media_text(model: ServedModel) -> str:
    """Return whether the model reads images and sounds, if it has a projector."""
    media = {"vision": "images", "audio": "sounds"}
    readable = [word for name, word in media.items() if name in model.capabilities]
    if readable:
        return f", reads {' and '.join(readable)}"
    reason = model.facts.details.get("images_off")
    if reason:
        return f", reads no images: {reason}"
    return ""


def _print_models_left(router: ModelRouter) -> None:
    """Print the other models that the server offers after all named models failed to load.

    This is printed even if quiet.
    """

    failed_names = {model.name for model in router.named}
    other_names = [model.name for model in router.list() if model.name not in failed_names]
    more_text = ""
    if len(other_names) > _MAX_NAMED:
        more_text = f" and {len(other_names) - _MAX_NAMED} more"
    names = ", ".join(other_names[:_MAX_NAMED])
    print(
        "no model is loaded; requests can name another installed model "
        f"({names}{more_text}); Ctrl-C stops",
        file=sys.stderr,
        flush=True,
    )


async def _serve(
    router: ModelRouter,
    settings: ServerSettings,
    socks: Sequence[socket.socket],
    store: LibraryStore | None,
    report: Callable[[str], None] | None,
    loading: asyncio.Task[None],
    warm_up_app: Callable[[Starlette], Coroutine[None, None, None]] | None,
) -> None:
    app, serve_on = await asyncio.to_thread(application, router, settings, store)
    # While the model loads, its worker needs the processors, and then the first request does.
    loop = asyncio.get_running_loop()
    loading.add_done_callback(
        lambda _: loop.call_later(_IMPORT_DELAY_S, _in_thread, _import_other_dialects, app)
    )
    served_app = app if report is None else with_request_log(app, report)
    if warm_up_app is None:
        await serve_on(served_app, socks, settings)
        return
    warming = asyncio.create_task(warm_up_app(app))
    try:
        await serve_on(served_app, socks, settings)
    finally:
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)


async def _warm_up(loading: asyncio.Task[None], warm: str, app: Starlette) -> None:
    """Prefill instructions once the models are loaded. An error is printed, and the server
    continues."""
    from localllm.cli.serve.warm_file import warming_request
    from localllm.server.warming import Warming

    try:
        warming = Warming(app.state.server, warming_request(warm))
        app.state.server.warming = warming
        await asyncio.wait({loading})
        await warming.run()
    except LocalLLMError as e:
        print(f"error: {e.message}\nhint: {e.hint}", file=sys.stderr, flush=True)


def application(
    router: ModelRouter, settings: ServerSettings, store: LibraryStore | None = None
) -> tuple[Starlette, Callable[..., Awaitable[None]]]:
    """Return the application and the function that serves it.

    Importing this code takes as long as loading a small model, so it runs in a thread meanwhile.
    Parts that only requests need are loaded in threads after it.
    """
    import gc

    # All objects made here are permanent. Garbage collection now would take a tenth of the time,
    # and later it would pause streams.
    gc.disable()
    try:
        from localllm.device.probes.power import power_figures
        from localllm.server.app import create_app
        from localllm.server.http.run import serve_on

        app = create_app(router, settings=settings, store=store, power=power_figures)
        _in_thread(_import_first_dialect, app)
        return app, serve_on
    finally:
        gc.freeze()
        gc.enable()


def _in_thread(prepare: Callable[[Starlette], None], app: Starlette) -> None:
    import threading

    threading.Thread(target=prepare, args=[app], name="first uses", daemon=True).start()


def _import_first_dialect(app: Starlette) -> None:
    """Import OpenAI's chat, the most likely first request, and then start the template process.
    Both at the same time would take a processor from the worker that loads."""
    from localllm.conversation.template import warm_up
    from localllm.server.dialects.openapi import build_bodies

    first_dialect, _ = app.state.dialects
    first_dialect.paths()
    build_bodies()
    warm_up()


def _import_other_dialects(app: Starlette) -> None:
    """Import the other dialects."""
    from localllm.server.dialects.openapi import build_bodies

    _, other_dialects = app.state.dialects
    other_dialects.paths()
    build_bodies()


def stop_when_terminated() -> None:
    """Stop the server on SIGTERM (kill, launchd, containers) or when the terminal closes, as on
    Ctrl-C.

    Streams are ended properly, and workers are closed.
    """
    import signal

    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError):  # Windows has no such signals
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        # otherwise it was started with nohup, to outlive its terminal
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            loop.add_signal_handler(signal.SIGHUP, task.cancel)


def _memory_text(model: ServedModel, holder: str) -> str:
    """Return the memory of the worker's model and context, or the planned size if it is unknown.

    Names that share a worker have it in the line of the first one, the `holder`.
    """
    if model.name != holder:
        return f"in the memory of {holder}"
    memory = getattr(getattr(model.worker.host, "client", None), "memory", None)
    if memory is None:
        return f"{gb(model.facts.needs_bytes, 2)} allocated"
    return f"{gb(memory.total_bytes, 2)} allocated"


# Paths that answer 503 until a model is loaded. Pollers ask them many times a second, and the
# server itself reports the progress and the failure of a load.
_HEALTH_PATHS = ("/health", "/v1/health")
# Paths that monitoring tools request often. They are logged only if they fail.
_MONITORING_PATHS = (
    *_HEALTH_PATHS,
    "/metrics",
    "/v1/models",
    "/api/tags",
    "/api/ps",
    "/props",
    "/slots",
    "/v1/responses/input_tokens",
    "/tokenize",
)
_MAX_PATH_CHARS = 60


def with_request_log(
    app: App, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> App:
    """Wrap `app` so that it reports each finished request: time, path, status, seconds, and the
    figures of its answer.

    The content of requests and answers is never reported.
    """

    async def with_notice(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started_s = clock()
        status = 0
        figures: list[str] = []
        LOGGED.set(figures)

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_and_note_status)
        finally:
            if _is_logged(scope["path"], status):
                report(", ".join([_line(scope, status, clock() - started_s), *figures]))

    return with_notice


def _is_logged(path: str, status: int) -> bool:
    if status == 503 and path in _HEALTH_PATHS:
        return False
    return status >= 400 or path not in _MONITORING_PATHS


def _line(scope: Scope, status: int, took_s: float) -> str:
    # A path comes from the client: it must not control the terminal.
    path = "".join(char if char.isprintable() else "?" for char in scope["path"])
    if len(path) > _MAX_PATH_CHARS:
        path = path[: _MAX_PATH_CHARS - 1] + "…"
    result = str(status) if status else "client disconnected before the answer"
    time_text = time.strftime("%H:%M:%S")
    return f"{time_text}  {scope['method']} {path}  {result}  {took_s:.2f} s"
