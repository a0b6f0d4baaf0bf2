"""The chat's own engine: a server in a background thread that offers the installed models."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from localllm.cli.serve.presets import Preset, load_presets, preset_and_model
from localllm.cli.serve.run import application, wait_until_ordered
from localllm.engine.worker.pipe import end_ahead, prepare_ahead, start_ahead
from localllm.errors import LocalLLMError, UsageError
from localllm.library.resolve import resolve
from localllm.plain_output import TerminalLine
from localllm.server.http.sockets import bind
from localllm.settings import Settings
from localllm_tui.control.interfaces import EngineProgress

if TYPE_CHECKING:
    from localllm.library.types import LocalModel
    from localllm.server.models.router import ModelRouter
    from localllm.server.models.served import ServedModel

# How the chat asks the starter model: docs/models.md has the figures of `benchmarks.starter`.
_STARTER_SYSTEM = "Answer the question in one or two short sentences."
_STARTER_SAMPLING = {"temperature": 0.2, "top_p": 0.9, "repeat_penalty": 1.1}
_POLL_S = 0.1
_QUIET_S = 1.0
_STOP_TIMEOUT_S = 10.0


class OwnEngine:
    """Implements localllm_tui.control.interfaces.ChatEngine on a free loopback port.

    Every user of this machine can connect to that port, so each engine makes its own key. The key
    is only in the memory of this process and of the programs that it starts.

    The constructor is fast, and the model's name is known after it. Raises ModelNotFoundError,
    ModelFileError or UsageError.
    """

    where = unix_socket = ""
    ours = True

    def __init__(self, model: str | None, settings: Settings) -> None:
        self.api_key: str | None = secrets.token_urlsafe(24)
        self._settings = settings
        self._presets = load_presets()
        model_name = model or self._settings.value("model")
        self._preset, model_file_name = preset_and_model(self._presets, model_name)
        self._local_model = resolve(model_file_name)
        self._presets = _with_starter(self._presets, self._local_model)
        self.model = self._local_model.name
        if self._preset is not None:
            self.model = self._preset.name
        [self._sock] = bind("127.0.0.1", 0)
        _check_loopback(self._sock)
        self.base_url = f"http://127.0.0.1:{self._sock.getsockname()[1]}/v1"
        self._served_model: ServedModel | None = None
        self._error: LocalLLMError | None = None
        self._thread: threading.Thread | None = None
        self._loading_ended = threading.Event()
        self._ended = False

    def start(self) -> None:
        """Start serving and loading in a thread. Further calls have no effect."""
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._serving = self._loop.create_task(self._serve())
            self._thread = threading.Thread(target=self._run, name="server", daemon=True)
            self._thread.start()

    def progress(self) -> EngineProgress:
        if not self._loading_ended.is_set():
            share = 0.0
            if self._served_model is not None:
                share = self._served_model.worker.progress
            return EngineProgress("loading", share)
        if self._error is not None:
            return EngineProgress("failed", 0.0, self._error, self._ended)
        return EngineProgress()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until loading succeeds or fails. Returns False on timeout."""
        return self._loading_ended.wait(timeout_s)

    def stop(self) -> None:
        """Stop the server and wait for its end. May be called from any thread."""
        if self._thread is None:
            self._sock.close()
            return
        with suppress(RuntimeError):  # it has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(timeout=_STOP_TIMEOUT_S)

    # -- the server's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(asyncio.wait([self._serving]))
            self._serving.result()
        except asyncio.CancelledError:
            pass
        except BaseException as e:
            self._fail(e)
        finally:
            self._sock.close()
            self._ended = True
            self._loading_ended.set()

    def _fail(self, e: BaseException) -> None:
        if isinstance(e, LocalLLMError):
            self._error = e
        else:
            self._error = LocalLLMError(f"the chat's server failed: {e!r}")

    async def _serve(self) -> None:
        from localllm.cli.serve.decode_speed import DecodeSpeedWatch
        from localllm.server.http.settings import ServerSettings

        server_settings = ServerSettings(
            host="127.0.0.1",
            port=0,
            api_key=self.api_key,
            keeps_awake=self._settings.value("keep_awake"),
        ).secured()
        router = await self._router_and_worker()
        # The chat shows the notice from the list of models, so it needs no report.
        speed_watch = asyncio.create_task(DecodeSpeedWatch(router, lambda _: None).run())
        loading = asyncio.create_task(self._load_first())
        try:
            await wait_until_ordered(loading)
            app, serve_on = await asyncio.to_thread(application, router, server_settings)
            await loading
            self._loading_ended.set()
            await serve_on(app, [self._sock], server_settings, quiet=True)
        finally:
            loading.cancel()
            speed_watch.cancel()
            await router.close()

    async def _router_and_worker(self) -> ModelRouter:
        """Make the router. Planning takes as long as importing the engine, so a worker starts
        meanwhile."""
        await start_ahead()
        prepare_ahead(self._local_model.path, self._settings.value("backend"))
        try:
            return await asyncio.to_thread(self._router)
        except BaseException:
            await end_ahead()
            raise

    async def _load_first(self) -> None:
        try:
            if self._served_model is not None:
                await self._served_model.engine()
        except LocalLLMError as e:
            self._fail(e)
        finally:
            await end_ahead()

    def _router(self) -> ModelRouter:
        """Return a router with the model and the other installed models.

        If the model can't be planned, the router lacks it, and `progress` returns the error.
        """
        from localllm.cli.serve.model_router import router_for
        from localllm.cli.serve.served_models import ServedModels
        from localllm.load.load_plan import make_load_plan

        served = ServedModels(self._settings, self._presets)
        settings = served.settings_for(self._local_model, self._preset)
        try:
            load = make_load_plan(self._local_model, settings, "chat")
            if load.embedding is not None:
                output_kind = "scores" if load.ranks else "embeddings"
                raise UsageError(
                    f"{load.name} generates {output_kind}, not text",
                    hint="choose a chat model from `localllm models list`",
                )
            router = router_for([load], served=served, presets=[self._preset], only=False)
            self._served_model = router.resolve(self.model)
        except LocalLLMError as e:
            self._fail(e)
            return router_for([], served=served, only=False)
        return router


def _with_starter(presets: tuple[Preset, ...], local: LocalModel) -> tuple[Preset, ...]:
    """`presets`, with that of the starter model if the chat uses it and config.toml has no table for
    it."""
    if local.origin != "starter" or any(preset.name == local.name for preset in presets):
        return presets
    return (
        *presets,
        Preset(
            name=local.name, model=local.name, sampling=_STARTER_SAMPLING, system=_STARTER_SYSTEM
        ),
    )


@contextmanager
def loaded(engine: OwnEngine) -> Iterator[OwnEngine]:
    """Keep `engine` loaded inside the `with` block. Raises the error of a failed load.

    If loading takes over a second, a message on stderr shows it.
    """
    try:
        engine.start()
        _wait_for_loading(engine)
        error = engine.progress().error
        if error is not None:
            raise error
        yield engine
    finally:
        engine.stop()


def _wait_for_loading(engine: OwnEngine) -> None:
    """Wait until loading has ended. On a terminal, a line shows the progress."""
    line = TerminalLine(sys.stderr)
    text = f"loading {engine.model} …"
    if engine.wait(_QUIET_S):
        return
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
    try:
        while not engine.wait(_POLL_S):
            line.show(f"{text} {engine.progress().share:4.0%}")
    finally:
        line.show("")


def _check_loopback(server_socket: socket.socket) -> None:
    """Raise LocalLLMError if this machine can't connect to itself.

    That happens in a namespace or container whose loopback interface is down.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                server_socket.getsockname()
            )  # this only selects a route and sends no packet
        except OSError as e:
            server_socket.close()
            raise LocalLLMError(
                f"127.0.0.1 can't be reached ({e.strerror}), "
                "but the chat connects to its engine there",
                hint="the loopback network is down: "
                "`ip link set lo up`, or start the container with a network",
            ) from e
