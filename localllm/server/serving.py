"""Answers one request of any dialect: find the engine, make the job, generate, and tell it whole or as it comes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from localllm.conversation.recall import Recall
from localllm.engine.api import Engine
from localllm.errors import LocalLLMError
from localllm.server.generation.compacting import Counts
from localllm.server.generation.conversing import Ask, Remembering, job_for
from localllm.server.generation.folding import Fold
from localllm.server.generation.generate import run
from localllm.server.generation.job import Job, Progress, Writer
from localllm.server.http.headers import IGNORED, ignored_header, request_id
from localllm.server.http.settings import ServerSettings
from localllm.server.http.streaming import Outbox, StreamResponse, unless_gone
from localllm.server.models.router import ModelRouter, ServedModel

log = logging.getLogger("localllm.server")
MakeJob: TypeAlias = Callable[[Engine], Awaitable[Job]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API frames its streams and errors. `streams`: it does so unless told not to."""

    media_type: str
    frame_error: Callable[[LocalLLMError], bytes]
    keepalive: Callable[[Progress], bytes]
    error_body: Callable[[LocalLLMError], dict[str, Any]] = LocalLLMError.to_openai
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """One request, translated: the `task` to do, and how its answer is written down, `whole` or by a `writer` as it
    comes. `ignored` names fields without effect; `frame_error` is for a stream whose last frame tells more than the
    dialect's does."""

    task: Ask | MakeJob
    whole: Callable[[Fold, Job], Any]
    writer: Callable[[Outbox, Job, Progress], Writer]
    ignored: tuple[str, ...] = ()
    frame_error: Callable[[LocalLLMError], bytes] | None = None


class Server:
    """What the routes share: the models and the settings."""

    def __init__(self, models: ModelRouter, settings: ServerSettings) -> None:
        self.models = models
        self.settings = settings
        self.recall = Recall()
        self.counts = Counts()
        self.requests = 0
        self.active = 0

    async def stream(self, model: ServedModel, order: Order, dialect: Dialect) -> StreamResponse:
        """A streaming response; loading, rendering and queueing all happen inside it, behind early headers."""
        progress = Progress()
        headers = {**request_id(), **ignored_header(order.ignored)}

        async def produce(outbox: Outbox) -> None:
            def begin(job: Job) -> Writer:
                headers.update(_about(order, job))
                return order.writer(outbox, job, progress)

            await self._generate(model, order, progress, begin)

        return StreamResponse(
            produce,
            settings=self.settings,
            media_type=dialect.media_type,
            keepalive=lambda: dialect.keepalive(progress),
            frame_error=order.frame_error or dialect.frame_error,
            error_body=dialect.error_body,
            headers=lambda: headers,
        )

    async def whole(self, request: Request, model: ServedModel, order: Order) -> Response:
        """The reply in one piece: the stream, folded. Cancelled when the client leaves."""

        async def work() -> tuple[Fold, Job]:
            folds: list[Fold] = []

            def begin(job: Job) -> Writer:
                folds.append(Fold(job.choices))
                return folds[0]

            job = await self._generate(model, order, Progress(), begin)
            return folds[0], job

        done = await unless_gone(request, work())
        if done is None:
            return Response(status_code=499)
        fold, job = done
        headers = {**request_id(), **_about(order, job), "x-localllm-cache": fold.usage.cache_note}
        return JSONResponse(order.whole(fold, job), headers=headers)

    async def job(self, task: Ask | MakeJob, model: ServedModel, engine: Engine) -> Job:
        """What `task` makes the engine do. Raises RequestError and what rendering ends in."""
        if isinstance(task, Ask):
            return await job_for(task, model, engine, self.recall, self.counts)
        return await task(engine)

    async def count(self, order: Order, model: ServedModel) -> int:
        """How many tokens the prompt of a conversation has."""
        with model.lease():
            engine = await model.engine()
            job = await self.job(order.task, model, engine)
            assert isinstance(job.prompt, str)
            return len(await engine.tokenize(job.prompt, add_bos=job.add_bos))

    def counted(self, model: ServedModel) -> _Lease:
        """A block in which a request of `model` runs: it is counted, and its model kept."""
        self.requests += 1
        return _Lease(self, model)

    async def _generate(
        self, model: ServedModel, order: Order, progress: Progress, begin: Callable[[Job], Writer]
    ) -> Job:
        with self.counted(model):
            engine = await model.engine()
            job = await self.job(order.task, model, engine)
            _note(order, job)
            writer = begin(job)
            if job.asked is not None:
                writer = Remembering(writer, self.recall, job.asked)
            await run(engine, job, writer, progress)
            return job


class _Lease:
    """Counts a request against the server and its model while it runs: a model in use is never unloaded."""

    def __init__(self, server: Server, model: ServedModel) -> None:
        self._server, self._lease = server, model.lease()

    def __enter__(self) -> None:
        self._server.active += 1
        self._lease.__enter__()

    def __exit__(self, *_: object) -> None:
        self._server.active -= 1
        self._lease.__exit__(None, None, None)


def _about(order: Order, job: Job) -> dict[str, str]:
    """Headers that say what was ignored, taken out of the prompt and left out of the conversation."""
    said = ignored_header([*order.ignored, *job.ignored])
    if job.normalised:
        said["x-localllm-normalised"] = ",".join(job.normalised)
    if job.compacted:
        said["x-localllm-compacted"] = job.compacted
    return said


def _note(order: Order, job: Job) -> None:
    ignored = ignored_header([*order.ignored, *job.ignored])
    if ignored:
        log.info("ignored unknown fields: %s", ignored[IGNORED])
    if job.compacted:
        log.info("compacted a conversation: left out %s", job.compacted)
