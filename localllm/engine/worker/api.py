"""The engine as its users (server, bench) see it. `client.WorkerClient` and `supervisor.Supervisor` are the real ones;
tests script their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from localllm.engine.messages import Event, Failure, Finish, Request
from localllm_backends.contract import ModelInfo


class EngineClient(Protocol):
    """One loaded model in its worker process."""

    info: ModelInfo

    def submit(self, request: Request) -> AsyncIterator[Event]:
        """Send a request; yields its events and ends after exactly one Finish or Failure.

        Closing the iterator early (`aclose`, a client that went away) cancels the request within one engine step.
        A too-long prompt yields a Failure with code `context_length_exceeded` before any queue; a dead worker yields
        a Failure with code `worker_died` within two seconds.
        """
        ...

    async def listen(self, request: Request, hear: Callable[[Event], None]) -> Finish | Failure:
        """`submit` without a task's turn for every token: `hear` is called with each event but the last the moment it
        arrives, and the last one is returned.

        Cancelling this coroutine cancels the request, and so does an error of `hear`, which is raised here.
        """
        ...

    async def tokenize(
        self, text: str, *, special: bool = True, add_bos: bool = False, images: dict[str, str] | None = None
    ) -> list[int]:
        """Token ids of `text` under the model's vocabulary; marks in it stand for `images` (base64), whose are below zero."""
        ...

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of `tokens`."""
        ...

    async def snapshot(self) -> dict[str, Any]:
        """The engine's metrics now, as plain JSON values (see localllm.engine.host.metrics)."""
        ...


class Host(Protocol):
    """Something that can give a loaded Engine for a model name, loading or reloading it when needed."""

    async def engine(self) -> EngineClient:
        """The loaded engine; loads on first use, reloads after a crash (with back-off). Raises LocalLLMError."""
        ...

    async def close(self) -> None:
        """Stop the worker and free its memory."""
        ...
