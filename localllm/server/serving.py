"""Answers one request of any dialect: find the engine, make the job, generate, and tell it whole or as it comes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from localllm.conversation.recall import Recall
from localllm.engine.worker.api import EngineClient
from localllm.errors import LocalLLMError
from localllm.server.generation.chat import Ask, Remembering, WithImages, job_for
from localllm.server.generation.collector import Fold
from localllm.server.generation.compaction import Counts
from localllm.server.generation.generate import run
from localllm.server.generation.image_fetching import ImageFetcher
from localllm.server.generation.job import PrefillProgress, Prepared, ReplyWriter, Spent
from localllm.server.generation.pdf_reading import PdfReader
from localllm.server.http.accounts import Accounts, caller
from localllm.server.http.asgi import IGNORED, ignored_header, request_id
from localllm.server.http.settings import ServerSettings
from localllm.server.http.streaming import Outbox, StreamResponse, unless_gone
from localllm.server.models.installed import ModelStore
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.served import Defaults
from localllm.server.models.unloading import Keeper

log = logging.getLogger("localllm.server")
MakeJob: TypeAlias = Callable[[EngineClient], Awaitable[Prepared]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API frames its streams and errors. `streams`: it does so unless told not to."""

    media_type: str
    frame_error: Callable[[LocalLLMError], bytes]
    keepalive: Callable[[PrefillProgress], bytes]
    error_body: Callable[[LocalLLMError], dict[str, Any]] = LocalLLMError.to_openai
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """One request, translated: the `task` to do, and how its answer is written down, `whole` or by a `writer` as it
    comes. `ignored` names fields without effect; `frame_error` and `keepalive` are for a stream whose frames tell more
    than the dialect's do. `keep_s`: how long the model stays loaded behind it, where the client says so."""

    task: Ask | MakeJob
    whole: Callable[[Fold, Prepared], Any]
    writer: Callable[[Outbox, Prepared, PrefillProgress], ReplyWriter]
    ignored: tuple[str, ...] = ()
    frame_error: Callable[[LocalLLMError], bytes] | None = None
    keepalive: Callable[[PrefillProgress], bytes] | None = None
    keep_s: float | None = None


class Server:
    """What the routes share: the models and the settings; and where models are fetched to, if clients may do that."""

    def __init__(self, models: ModelRouter, settings: ServerSettings, store: ModelStore | None = None) -> None:
        self.models = models
        self.settings = settings
        self.store = store
        self.accounts = Accounts(settings.keys, settings.api_key)
        self.recall = Recall()
        self.counts = Counts()
        self.images = ImageFetcher(settings.image_hosts)
        self.pdfs = PdfReader()
        self.keeper = Keeper()
        self.requests = 0
        self.active = 0

    async def stream(self, model: ServedModel, order: Order, dialect: Dialect) -> StreamResponse:
        """A streaming response; loading, rendering and queueing all happen inside it, behind early headers."""
        progress = PrefillProgress()
        headers = {**request_id(), **ignored_header(order.ignored)}
        keepalive = order.keepalive or dialect.keepalive

        def said() -> bytes:
            progress.loaded = model.worker.progress
            return keepalive(progress)

        async def produce(outbox: Outbox) -> None:
            def begin(job: Prepared) -> ReplyWriter:
                headers.update(_about(order, job))
                return order.writer(outbox, job, progress)

            await self._generate(model, order, progress, begin)

        return StreamResponse(
            produce,
            settings=self.settings,
            media_type=dialect.media_type,
            keepalive=said,
            frame_error=order.frame_error or dialect.frame_error,
            error_body=dialect.error_body,
            headers=lambda: headers,
        )

    async def whole(self, request: Request, model: ServedModel, order: Order) -> Response:
        """The reply in one piece: the stream, folded. Cancelled when the client leaves."""

        async def work() -> tuple[Fold, Prepared]:
            folds: list[Fold] = []

            def begin(job: Prepared) -> ReplyWriter:
                folds.append(Fold(job.choices))
                return folds[0]

            job = await self._generate(model, order, PrefillProgress(), begin)
            return folds[0], job

        done = await unless_gone(request, work())
        if done is None:
            return Response(status_code=499)
        fold, job = done
        headers = {**request_id(), **_about(order, job), "x-localllm-cache": fold.usage.cache_note}
        return JSONResponse(order.whole(fold, job), headers=headers)

    async def job(self, task: Ask | MakeJob, model: ServedModel, engine: EngineClient) -> Prepared:
        """What `task` makes the engine do. Raises RequestError and what rendering ends in."""
        if isinstance(task, Ask):
            if engine.info.sees:
                task = replace(task, messages=await self.images.fetched(task.messages))
            task = await self.pdfs.read(task, sees=engine.info.sees)
            return await job_for(with_defaults(task, model.defaults), model, engine, self.recall, self.counts)
        return await task(engine)

    async def prompt(self, order: Order, model: ServedModel) -> tuple[str, list[str]]:
        """The prompt of a conversation, and the names of what has no effect."""
        with model.lease():
            job = await self.job(order.task, model, await model.engine())
        assert isinstance(job.prompt, str)
        return job.prompt, [*order.ignored, *job.ignored]

    async def count(self, order: Order, model: ServedModel) -> tuple[int, list[str]]:
        """How many tokens the prompt of a conversation has, and the names of what has no effect."""
        with model.lease():
            engine = await model.engine()
            job = await self.job(order.task, model, engine)
            assert isinstance(job.prompt, str)
            counting = WithImages(engine, job.images)
            tokens = await counting.tokenize(job.prompt, add_bos=job.add_bos)
            return len(tokens), [*order.ignored, *job.ignored]

    def counted(self, model: ServedModel, keep_s: float | None = None) -> _Lease:
        """A block in which a request of `model` runs: it is counted, and its model kept; behind it for `keep_s`, where
        the client says so."""
        self.requests += 1
        return _Lease(self, model, keep_s)

    async def _generate(
        self, model: ServedModel, order: Order, progress: PrefillProgress, begin: Callable[[Prepared], ReplyWriter]
    ) -> Prepared:
        with self.counted(model, order.keep_s):
            engine = await model.engine()
            job = await self.job(order.task, model, engine)
            _note(order, job)
            writer = begin(job)
            if job.asked is not None:
                writer = Remembering(writer, self.recall, job.asked)
            account = caller()
            job = replace(job, generation=replace(job.generation, tenant=account.name))
            spent: Spent | None = None
            try:
                spent = await run(engine, job, writer, progress)
            finally:
                # Of an answer that was broken off: what is known of it.
                known = spent or Spent(progress.done, progress.written, progress.cached)
                account.charge(known.prompt_tokens, known.cached_tokens, known.completion_tokens)
            return job


class _Lease:
    """Counts a request against the server and its model while it runs: a model in use is never unloaded."""

    def __init__(self, server: Server, model: ServedModel, keep_s: float | None) -> None:
        self._server, self._model, self._keep_s, self._lease = server, model, keep_s, model.lease()

    def __enter__(self) -> None:
        self._server.active += 1
        self._lease.__enter__()
        if self._keep_s is not None:
            self._server.keeper.keep(self._model.worker, self._keep_s)

    def __exit__(self, *_: object) -> None:
        self._server.active -= 1
        self._lease.__exit__(None, None, None)


def with_defaults(ask: Ask, defaults: Defaults) -> Ask:
    """`ask` with what its model's preset says and the client does not: a system text, a thinking budget."""
    generation = ask.generation
    if generation.thinking_tokens is None and defaults.thinking_tokens is not None:
        generation = replace(generation, thinking_tokens=defaults.thinking_tokens)
    messages = ask.messages
    if defaults.system and not any(m["role"] in ("system", "developer") for m in messages):
        messages = [{"role": "system", "content": defaults.system}, *messages]
    return replace(ask, messages=messages, generation=generation)


def _about(order: Order, job: Prepared) -> dict[str, str]:
    """Headers that say what was ignored, taken out of the prompt and left out of the conversation."""
    said = ignored_header([*order.ignored, *job.ignored])
    if job.normalised:
        said["x-localllm-normalised"] = ",".join(job.normalised)
    if job.compacted:
        said["x-localllm-compacted"] = job.compacted
    return said


def _note(order: Order, job: Prepared) -> None:
    ignored = ignored_header([*order.ignored, *job.ignored])
    if ignored:
        log.info("ignored unknown fields: %s", ignored[IGNORED])
    if job.compacted:
        log.info("compacted a conversation: left out %s", job.compacted)
