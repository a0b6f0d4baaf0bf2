"""The engine of a chat's own: a server in the background for as long as it runs, which offers what
is installed here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from localllm.cli.serve.run import application
from localllm.errors import LocalLLMError, UsageError
from localllm.plain_output import raw_write

if TYPE_CHECKING:
    import asyncio
    import socket

    from localllm.load.load_plan import LoadPlan
    from localllm.server.models.router import ModelRouter
    from localllm.server.models.served import ServedModel
    from localllm_tui.control.interfaces import EngineProgress

import sys
import time
from collections.abc import Callable

_LOOK_S = 0.1
_STOP_S = 10.0


class OwnEngine:
    """Implements localllm_tui.control.interfaces.ChatEngine, on a free loopback port. `placed`:
    settings of where the model lies, None where nothing was said. Made at once: the model is known
    by name then. Raises ModelNotFoundError, ModelFileError or UsageError."""

    where = unix_socket = ""
    api_key: str | None = None

    def __init__(
        self,
        model: str | None,
        context: int | None = None,
        placed: Mapping[str, object] | None = None,
    ) -> None:
        from localllm.cli.serve.presets import load_presets
        from localllm.cli.serve.served_models import ServedModels
        from localllm.library.resolve import resolve
        from localllm.server.http.sockets import bind
        from localllm.settings import Settings

        self._settings = Settings({"context": context, **(placed or {})})
        self._served = ServedModels(self._settings, load_presets())
        reference = model or self._settings.value("model")
        self._preset = self._served.preset(reference)
        named = self._preset.model if self._preset is not None else reference
        self._local = resolve(named, offline=bool(self._settings.value("offline")))
        self.model = self._preset.name if self._preset is not None else self._local.name
        [self._sock] = bind("127.0.0.1", 0)
        _reach(self._sock)
        self.base_url = f"http://127.0.0.1:{self._sock.getsockname()[1]}/v1"
        self._first: ServedModel | None = None
        self._error: LocalLLMError | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._tried = threading.Event()
        self._down = False

    def start(self) -> None:
        """Begin to serve and to load, in a thread; once is enough."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="server", daemon=True)
            self._thread.start()

    def progress(self) -> EngineProgress:
        from localllm_tui.control.interfaces import EngineProgress

        if not self._tried.is_set():
            return EngineProgress(
                "loading", self._first.worker.progress if self._first is not None else 0.0
            )
        return (
            EngineProgress("failed", 0.0, self._error, self._down)
            if self._error is not None
            else EngineProgress()
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until loading has ended, well or not; False where it has not by then."""
        return self._tried.wait(timeout_s)

    def stop(self) -> None:
        """End the server, from any thread; waits for its end."""
        if self._thread is None:
            self._sock.close()
            return
        self._begun.wait()
        if self._running is not None:
            loop, task = self._running
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)
        self._thread.join(timeout=_STOP_S)

    # -- its thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        import asyncio

        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as e:
            self._fail(e)
        finally:
            self._begun.set()
            self._sock.close()
            self._down = True
            self._tried.set()

    def _fail(self, e: BaseException) -> None:
        self._error = (
            e if isinstance(e, LocalLLMError) else LocalLLMError(f"the chat's server failed: {e!r}")
        )

    async def _serve(self) -> None:
        import asyncio

        from localllm.cli.serve.decode_speed import DecodeSpeedWatch
        from localllm.server.http.settings import ServerSettings

        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        self._begun.set()
        secured = ServerSettings(
            host="127.0.0.1", port=0, api_key=None, keeps_awake=self._settings.value("keep_awake")
        ).secured()
        try:
            load = await asyncio.to_thread(self._plan)
            router = await asyncio.to_thread(self._router, [load])
            self._first = router.resolve(self.model)
        except LocalLLMError as e:
            self._fail(e)
            router = await asyncio.to_thread(self._router, [])
        # The chat has what it says from the list of models.
        pace = asyncio.create_task(DecodeSpeedWatch(router, lambda _: None).run())
        serving = asyncio.create_task(asyncio.to_thread(application, router, secured))
        try:
            if self._first is not None:
                try:
                    await self._first.engine()
                except LocalLLMError as e:
                    self._fail(e)
            app, serve_on = await serving
            self._tried.set()
            await serve_on(app, [self._sock], secured, quiet=True)
        finally:
            serving.cancel()
            pace.cancel()
            await router.close()

    def _plan(self) -> LoadPlan:
        from localllm.load.load_plan import make_load_plan

        load = make_load_plan(
            self._local, self._served.settings_for(self._local, self._preset), "chat"
        )
        if load.embedding is not None:
            raise UsageError(
                f"{load.name} makes {'scores' if load.ranks else 'embeddings'}, not text",
                hint="name a chat model: `localllm models list`",
            )
        return load

    def _router(self, loads: list[LoadPlan]) -> ModelRouter:
        from localllm.cli.serve.model_router import router_for

        return router_for(
            loads, served=self._served, presets=[self._preset] * len(loads), only=False
        )


@contextmanager
def loaded(engine: OwnEngine) -> Iterator[OwnEngine]:
    """`engine`, loaded, for as long as the block runs; says so on stderr when it takes over a
    second. Raises what loading ended in."""
    try:
        with loading_note(engine.model) as note:
            engine.start()
            while not engine.wait(_LOOK_S):
                note(engine.progress().share)
        error = engine.progress().error
        if error is not None:
            raise error
        yield engine
    finally:
        engine.stop()


_PATIENCE_S = 1.0


def _reach(own: socket.socket) -> None:
    """Raises LocalLLMError where this machine can't call itself: a namespace or container whose
    loopback is down."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(own.getsockname())  # a route is chosen, nothing is sent
        except OSError as e:
            own.close()
            raise LocalLLMError(
                f"127.0.0.1 can't be reached here ({e.strerror}), and the chat asks its engine "
                "there",
                hint="the loopback network is down: `ip link set lo up`, or start the container "
                "with a network",
            ) from e


@contextmanager
def loading_note(name: str) -> Iterator[Callable[[float], None]]:
    """Yields a function to call with 0.0 … 1.0; says nothing when all is over within a second."""
    started = time.monotonic()
    tty = sys.stderr.isatty()
    said = ""

    def note(progress: float) -> None:
        nonlocal said
        if time.monotonic() - started < _PATIENCE_S:
            return
        now = f"loading {name} … {progress:4.0%}"
        if tty and now != said:
            raw_write(sys.stderr)("\r")
            print(now, end="", file=sys.stderr, flush=True)
        elif not said:
            print(f"loading {name} …", file=sys.stderr, flush=True)
        said = now

    try:
        yield note
    finally:
        if said and tty:
            raw_write(sys.stderr)("\r\033[K")
            sys.stderr.flush()
