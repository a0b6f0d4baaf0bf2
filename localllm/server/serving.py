"""What every generating route does alike: read the body, find the model, answer whole or as a stream."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from localllm.conversation.recall import Recall
from localllm.engine.api import Engine
from localllm.errors import LocalLLMError
from localllm.server.dialects.openai.chat_reply import cache_note, ignored_header
from localllm.server.generation.compacting import Counts
from localllm.server.generation.conversing import Ask, Remembering, job_for
from localllm.server.generation.folding import Fold
from localllm.server.generation.generate import Job, Progress, Writer, run
from localllm.server.http.settings import ServerSettings
from localllm.server.http.streaming import Outbox, StreamResponse, unless_gone
from localllm.server.models.router import ModelRouter, ServedModel

log = logging.getLogger("localllm.server")
Prepare = Callable[[Engine], Awaitable[Job]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API frames its streams and errors."""

    media_type: str
    frame_error: Callable[[LocalLLMError], bytes]
    keepalive: Callable[[Progress], bytes]
    error_body: Callable[[LocalLLMError], dict[str, Any]] = LocalLLMError.to_openai


def comment(progress: Progress) -> bytes:
    """The keep-alive of server-sent events: a comment with the progress."""
    return f": {progress}\n\n".encode()


class Server:
    """What the routes share: the models and the settings."""

    def __init__(self, models: ModelRouter, settings: ServerSettings) -> None:
        self.models = models
        self.settings = settings
        self.recall = Recall()
        self.counts = Counts()
        self.requests = 0
        self.active = 0

    async def stream(
        self,
        model: ServedModel,
        prepare: Prepare,
        writer: Callable[[Outbox, Job, Progress], Writer],
        dialect: Dialect,
        ignored: Sequence[str] = (),
    ) -> StreamResponse:
        """A streaming response; loading, rendering and queueing all happen inside it, behind early headers."""
        progress = Progress()
        names = list(ignored)
        extra: dict[str, str] = {}

        async def produce(outbox: Outbox) -> None:
            with self.counted(model):
                engine = await model.engine()
                job = await prepare(engine)
                names.extend(job.ignored)
                extra.update({**normalised_header(job), **compacted_header(job)})
                self._note(names, job.compacted)
                await run(engine, job, self._remembering(writer(outbox, job, progress), job), progress)

        return StreamResponse(
            produce,
            settings=self.settings,
            media_type=dialect.media_type,
            keepalive=lambda: dialect.keepalive(progress),
            frame_error=dialect.frame_error,
            error_body=dialect.error_body,
            headers=lambda: {**request_id(), **ignored_header(names), **extra},
        )

    async def whole(
        self,
        request: Request,
        model: ServedModel,
        prepare: Prepare,
        body: Callable[[Fold, Job], Any],
        ignored: Sequence[str] = (),
    ) -> Response:
        """The reply in one piece: the stream, folded. Cancelled when the client leaves."""

        async def work() -> tuple[Fold, Job]:
            with self.counted(model):
                engine = await model.engine()
                job = await prepare(engine)
                fold = Fold(job.choices)
                await run(engine, job, self._remembering(fold, job), Progress())
                return fold, job

        done = await unless_gone(request, work())
        if done is None:
            return Response(status_code=499)
        fold, job = done
        names = [*ignored, *job.ignored]
        self._note(names, job.compacted)
        headers = {
            **request_id(),
            **ignored_header(names),
            **normalised_header(job),
            **compacted_header(job),
            "x-localllm-cache": cache_note(fold.usage),
        }
        return JSONResponse(body(fold, job), headers=headers)

    def prepare(self, ask: Ask, model: ServedModel) -> Prepare:
        """How to make the job of a conversation once the engine is there."""

        async def prepared(engine: Engine) -> Job:
            return await job_for(ask, model, engine, self.recall, self.counts)

        return prepared

    async def count(self, ask: Ask, model: ServedModel) -> int:
        """How many tokens the prompt of `ask` has."""
        with model.lease():
            engine = await model.engine()
            job = await job_for(ask, model, engine, self.recall, self.counts)
            assert isinstance(job.prompt, str)
            return len(await engine.tokenize(job.prompt, add_bos=job.add_bos))

    def _remembering(self, writer: Writer, job: Job) -> Writer:
        return writer if job.asked is None else Remembering(writer, self.recall, job.asked)

    def _note(self, ignored: Sequence[str], compacted: str = "") -> None:
        if ignored:
            log.info("ignored unknown fields: %s", ignored_header(ignored)["x-localllm-ignored"])
        if compacted:
            log.info("compacted a conversation: left out %s", compacted)

    def counted(self, model: ServedModel) -> _Lease:
        """A block in which a request of `model` runs: it is counted, and its model kept."""
        self.requests += 1
        return _Lease(self, model)


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


def normalised_header(job: Job) -> Mapping[str, str]:
    """`x-localllm-normalised`, when lines were taken out of the prompt."""
    return {"x-localllm-normalised": ",".join(job.normalised)} if job.normalised else {}


def compacted_header(job: Job) -> Mapping[str, str]:
    """`x-localllm-compacted`, when messages were left out."""
    return {"x-localllm-compacted": job.compacted} if job.compacted else {}


def request_id() -> Mapping[str, str]:
    """A fresh `x-request-id`."""
    return {"x-request-id": "req_" + secrets.token_hex(8)}
