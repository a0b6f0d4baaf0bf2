"""Supervises the worker process of one model.

The supervisor loads the model on first use if memory allows. It loads the model again after a
crash or a hang, and frees its memory when closed. This module also has the worker's client in the
parent process, and the watchdog that detects hangs.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar, cast

from localllm.engine.messages import Event, Failure, Finish, Request
from localllm.engine.worker.child_pipe import Pulse
from localllm.engine.worker.pipe import JsonProcess
from localllm.errors import (
    BusyError,
    DoesNotFitError,
    LibraryError,
    LocalLLMError,
    UnsupportedError,
    WorkerDiedError,
)
from localllm.memory.guard import Available
from localllm_backends.contract import ModelInfo

# Pauses before a reload after the first, second, … crash in a row. A model that crashes at once
# must not be reloaded in a tight loop.
_BACKOFF_S = (0.0, 0.5, 2.0, 8.0, 30.0)
# If a process has answered a request, or lived this long, its crash counts as an accident, and the
# model is reloaded at once.
_HEALTHY_AFTER_S = 60.0
# A request waits at most this long for the end of a pause.
_PATIENCE_S = 2.5


E = TypeVar("E", bound="EngineClient")
StartedE = TypeVar("StartedE", bound="EngineClient", covariant=True)

# Takes the pieces of a request's KV.
HearKv = Callable[[bytes], None]


class Startable(Protocol[StartedE]):
    """The options of the process to supervise: WorkerOptions or EmbeddingOptions."""

    @property
    def hang_s(self) -> float:
        """Seconds that its process may show no progress while a caller waits (0: no limit)."""

    def check_memory(self, available: Available | None = None) -> None:
        """Raise DoesNotFitError unless the headroom stays free after loading."""

    async def start(self, on_loading: Callable[[float], None] | None = None) -> StartedE:
        """Start the process and load the model. `on_loading` gets the loaded share, from 0 to 1."""


class LoadObserver(Protocol):
    """Learns how the loads of a worker end, and may choose another llama.cpp."""

    def died(self) -> bool:
        """Called if the process ended while it loaded. Returns True if the load is to be repeated."""

    def unusable(self, reason: str) -> bool:
        """Called if llama.cpp's library can't be used. Returns True if the load is to be repeated."""

    def loaded(self) -> None:
        """Called after a load."""


class Supervisor(Generic[E]):
    """Keeps the worker of one model running over time (a Host, client.py).

    `available`: returns the bytes of system memory that can be taken now (None: the system's
        figure). Every load must leave the options' headroom free.
    `smaller`: returns options that need less memory, or None. It is called in a thread if a load
        runs out of memory. The options are tried once, and kept.
    `observer`: is called in a thread after each load.
    """

    def __init__(
        self,
        options: Startable[E],
        on_loading: Callable[[float], None] | None = None,
        available: Available | None = None,
        smaller: Callable[[], Startable[E] | None] | None = None,
        observer: LoadObserver | None = None,
    ) -> None:
        self.options = options
        self._observer = observer
        self._smaller = smaller
        self._on_loading = on_loading
        self._available = available
        self._engine: E | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._crashes = 0
        self._started_s = 0.0
        self._not_before_s = 0.0
        self.loads = 0

    @property
    def client(self) -> E | None:
        """The loaded engine, if it is alive."""
        if self._engine is not None and self._engine.alive:
            return self._engine
        return None

    async def engine(self) -> E:
        """Return the loaded engine; load or reload it if necessary.

        Raises the LocalLLMError of the load. Before the load it raises DoesNotFitError if other
        programs have taken the planned memory, and BusyError if the process crashed several times
        in a row.
        """
        async with self._lock:
            if self._engine is not None and self._engine.alive:
                return self._engine
            if self._engine is not None:
                await self._engine.close()
                self._count_crash(healthy=self._is_healthy(self._engine))
                self._engine = None
            await self._back_off()
            self._engine = await self._start_repeatedly()
            self.loads += 1
            self._started_s = time.monotonic()
            self._keeper = asyncio.create_task(self._keep(self._engine))
            return self._engine

    async def _start_repeatedly(self) -> E:
        """Start the process, and again as long as the observer requests it."""
        while True:
            try:
                engine = await self._start()
            except WorkerDiedError:
                self._count_crash(healthy=False)
                observer = self._observer
                if observer is None or not await asyncio.to_thread(observer.died):
                    raise
            except LibraryError as e:
                observer = self._observer
                if observer is None or not await asyncio.to_thread(observer.unusable, e.message):
                    raise
            else:
                if self._observer is not None:
                    await asyncio.to_thread(self._observer.loaded)
                return engine

    async def _start(self) -> E:
        try:
            await asyncio.to_thread(self.options.check_memory, self._available)
            return await self.options.start(self._on_loading)
        except DoesNotFitError:
            # Other programs took memory after the planning, or the driver needs more than planned.
            smaller = None
            if self._smaller is not None:
                smaller = await asyncio.to_thread(self._smaller)
            if smaller is None:
                raise
            self.options = smaller
            self._smaller = None
        return await self._start()

    async def _keep(self, engine: E) -> None:
        """Watch `engine`, and reload the model if the process ended by accident.

        It reloads without waiting for a request, so the next request finds the model loaded. If
        that fails, the next request reports the error.
        """
        await watch(engine, self.options.hang_s)
        if self._is_healthy(engine):
            with suppress(LocalLLMError):
                await self.engine()

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        async with self._lock:
            if self._engine is not None:
                await self._engine.close()
                self._engine = None

    def _is_healthy(self, engine: E) -> bool:
        return engine.finished > 0 or time.monotonic() - self._started_s > _HEALTHY_AFTER_S

    def _count_crash(self, *, healthy: bool) -> None:
        self._crashes = 0 if healthy else self._crashes + 1
        pause_s = 0.0
        if self._crashes:
            pause_s = _BACKOFF_S[min(self._crashes, len(_BACKOFF_S)) - 1]
        self._not_before_s = time.monotonic() + pause_s

    async def _back_off(self) -> None:
        """Wait for the end of a short pause after a crash. During a long pause the client has to
        wait.
        """
        left_s = self._not_before_s - time.monotonic()
        if left_s > _PATIENCE_S:
            raise BusyError(
                f"the model's process ended {self._crashes} times in a row; it will be loaded "
                f"again in {left_s:.0f} s",
                retry_after_s=math.ceil(left_s),
            )
        await asyncio.sleep(max(0.0, left_s))


# The default limit for a process without progress.
HANG_S = 300.0
# A process that only waits uses less than this share of one core: it answers questions, and its
# threads wake up at times. A process that works uses more, even if it is last in the queue of a
# busy machine.
_IDLE_SHARE = 0.002
# The same limit for a process that does not answer. If a thread sleeps while it holds Python's
# GIL, every other thread wakes up 200 times a second to request it (measured: 0.9 % of a core for
# three threads). Such a process does not answer. A working process does, because native code
# releases the GIL.
_SILENT_SHARE = 0.05
# A working step is considered hung after this many times the longest step so far, and at least
# twice the patience.
_TIMES_LONGEST = 100.0
_KNOWS_AFTER_STEPS = 20
_MAX_POLL_S = 15.0


def effort_of(pid: int) -> float:
    """The seconds of processor time that a process has used, plus an amount for every read.

    The sum grows while the process works. Raises ProcessLookupError once it has ended.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        # Pages of a mapped model file count as reads on Linux and Windows, and as page-ins on
        # macOS.
        read_bytes = 0
        if hasattr(process, "io_counters"):
            read_bytes = process.io_counters().read_bytes
        page_ins = getattr(process.memory_info(), "pageins", 0)
    except psutil.Error as e:
        raise ProcessLookupError(pid) from e
    return float(times.user + times.system + read_bytes / 1e6 + page_ins)


class Watchdog:
    """Detects whether one process hangs. All times are in seconds of `clock`."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._last_effort = -math.inf
        self._checked_s = self._progress_s = clock()

    def verdict(self, pulse: Pulse, effort: float) -> str:
        """The reason why the process is considered hung; empty if it is not."""
        now = self._clock()
        since_s = now - self._checked_s
        idle_share = _SILENT_SHARE if pulse.silent else _IDLE_SHARE
        # After a longer gap (the machine slept) there is no basis for a verdict.
        if effort - self._last_effort > idle_share * since_s or since_s > self._patience_s / 2:
            self._progress_s = now
        self._last_effort = effort
        self._checked_s = now
        still_s = now - self._progress_s
        if pulse.busy_s <= self._patience_s:
            return ""
        if still_s > self._patience_s:
            return (
                f"one call has lasted {pulse.busy_s:.0f} s, the last {still_s:.0f} s of "
                "it without any progress"
            )
        has_history = pulse.steps >= _KNOWS_AFTER_STEPS and pulse.longest_step_s > 0
        if has_history and pulse.busy_s > max(
            2 * self._patience_s, _TIMES_LONGEST * pulse.longest_step_s
        ):
            return (
                f"one call has lasted {pulse.busy_s:.0f} s, and no earlier call lasted more than "
                f"{pulse.longest_step_s:.1f} s"
            )
        return ""


async def watch(engine: EngineClient, patience_s: float) -> None:
    """Watch `engine` until its process has ended, and call `kill_hung` if it hangs.

    `patience_s` 0: never. The process is not checked while no caller waits for it.
    """
    interval_s = min(patience_s / 10, _MAX_POLL_S)
    watchdog: Watchdog | None = None
    silent_since: float | None = None
    while engine.alive:
        with suppress(TimeoutError):
            await asyncio.wait_for(engine.process.wait(), interval_s or None)
        if not engine.has_waiters:
            watchdog = silent_since = None
            continue
        watchdog = watchdog or Watchdog(patience_s)
        pulse: Pulse | None = None
        with suppress(TimeoutError, WorkerDiedError):
            pulse = await asyncio.wait_for(engine.pulse(), max(interval_s, 0.5))
        if pulse is None:
            # Even its reader does not answer: the entire process has stopped, or one thread blocks
            # all others.
            silent_since = silent_since or time.monotonic()
            pulse = Pulse(time.monotonic() - silent_since, silent=True)
        else:
            silent_since = None
        try:
            reason = watchdog.verdict(pulse, effort_of(engine.pid))
        except ProcessLookupError:
            continue
        if reason:
            engine.process.kill_hung(reason)


class EngineClient(ABC):
    """One loaded model in its worker process, which has sent `ready`.

    `finished` counts the requests it has answered.
    """

    def __init__(self, process: JsonProcess, ready: dict[str, Any]) -> None:
        facts = ready["ready"]
        self.process = process
        listed = {name: tuple(facts[name]) for name in ("eog_tokens", "control_texts")}
        listed["adapters"] = tuple((digest, scale) for digest, scale in facts.get("adapters", ()))
        self.info = ModelInfo(**{**facts, **listed})
        self.finished = 0

    @property
    def alive(self) -> bool:
        """True while it accepts questions."""
        return self.process.can_send

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def kv_identity(self) -> dict[str, str]:
        """The identity of its KV (engine/cache/identity.py); {} if it sends none."""
        return {}

    @abstractmethod
    async def listen(self, request: Request, on_event: Callable[[Event], None]) -> Finish | Failure:
        """Send a request. Calls `on_event` with each event at once, except the last one, which is
        returned.

        Cancelling this coroutine cancels the request within one engine step. An error in `on_event`
        does the same, and is raised here. A prompt that is too long gives a Failure with code
        `context_length_exceeded` before any queue. A dead worker gives one with code `worker_died`
        within two seconds.
        """

    async def send_kv(
        self, request: Request, on_event: Callable[[Event], None], hear_kv: HearKv
    ) -> Finish | Failure:
        """Send a request with `sends_from`, as `listen` does. `hear_kv` gets its KV in pieces, and
        an empty piece after each frame (engine/transfer/wire.py)."""
        raise UnsupportedError("this model has no KV that another server can use")

    def more_kv(self, request_id: str) -> None:
        """Let the engine export one more block for a request of `send_kv`."""
        raise UnsupportedError(f"{request_id} sends no KV")

    @abstractmethod
    async def snapshot(self) -> dict[str, Any]:
        """Its counters as plain values."""

    async def tokenize(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        media: dict[str, str] | None = None,
    ) -> list[int]:
        """Token ids of `text`. Marks in it are replaced by `media`, whose tokens are below
        zero.

        An embedding model adds its own special tokens, whatever the arguments. Raises
        ContextLengthError if the text is longer than any model accepts.
        """
        question = _tokenize_question(text, special=special, add_bos=add_bos, media=media)
        return cast("list[int]", await self.process.ask(question))

    async def count_tokens(
        self, text: str, *, add_bos: bool = False, media: dict[str, str] | None = None
    ) -> int:
        """The number of tokens that `tokenize` returns. Their ids are not sent: those of a long text
        are a megabyte of JSON, which delays both processes."""
        question = _tokenize_question(text, special=True, add_bos=add_bos, media=media)
        return cast("int", await self.process.ask({**question, "counts": True}))

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of `tokens`. Bytes that are not UTF-8 become surrogate escapes (PEP 383)."""
        return cast("str", await self.process.ask({"op": "detokenize", "tokens": tokens}))

    @property
    def has_waiters(self) -> bool:
        """True while a caller waits for an answer."""
        return self.process.has_waiters

    async def pulse(self) -> Pulse:
        """The status of the process.

        This kind of process handles one question at a time, so if it answers, no other question is
        running.
        """
        await self.tokenize("")
        return Pulse(0.0)

    async def close(self) -> None:
        await self.process.close()


def _tokenize_question(
    text: str, *, special: bool, add_bos: bool, media: dict[str, str] | None
) -> dict[str, Any]:
    question = {"op": "tokenize", "text": text, "special": special, "add_bos": add_bos}
    if media:
        question["media"] = media
    return question
