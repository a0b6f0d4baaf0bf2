"""Answers one request of any dialect: find the engine, make the job, generate, and tell it whole or as it comes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from localllm.conversation.prefix_reuse import ReasoningCache
from localllm.engine.worker.api import EngineClient
from localllm.errors import LocalLLMError
from localllm.server.generation.chat import ChatRequest, EngineWithImages, ReasoningRecorder, job_for
from localllm.server.generation.collector import ReplyCollector
from localllm.server.generation.compaction import TokenCounts
from localllm.server.generation.generate import run
from localllm.server.generation.image_fetching import ImageFetcher
from localllm.server.generation.job import GenerationJob, PrefillProgress, ReplyUsage, ReplyWriter
from localllm.server.generation.pdf_reading import PdfReader
from localllm.server.http.accounts import Accounts, caller
from localllm.server.http.asgi import IGNORED, ignored_header, request_id
from localllm.server.http.settings import ServerSettings
from localllm.server.http.streaming import Outbox, StreamResponse, unless_gone
from localllm.server.models.installed import ModelStore
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.served import ModelDefaults
from localllm.server.models.unloading import KeepAlive

log = logging.getLogger("localllm.server")
JobFactory: TypeAlias = Callable[[EngineClient], Awaitable[GenerationJob]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API frames its streams and errors. `streams`: it does so unless told not to."""

    media_type: str
    frame_error: Callable[[LocalLLMError], bytes]
    keepalive: Callable[[PrefillProgress], bytes]
    error_body: Callable[[LocalLLMError], dict[str, Any]] = LocalLLMError.to_openai
    streams: bool = False


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """One request, translated: the `task` to do, and how its answer is written down, `whole` or by a `writer` as it
    comes. `ignored` names fields without effect; `frame_error` and `keepalive` are for a stream whose frames tell more
    than the dialect's do. `keep_s`: how long the model stays loaded behind it, where the client says so."""

    task: ChatRequest | JobFactory
    whole: Callable[[ReplyCollector, GenerationJob], Any]
    writer: Callable[[Outbox, GenerationJob, PrefillProgress], ReplyWriter]
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
        self.recall = ReasoningCache()
        self.counts = TokenCounts()
        self.images = ImageFetcher(settings.image_hosts)
        self.pdfs = PdfReader()
        self.keeper = KeepAlive()
        self.requests = 0
        self.active = 0

    async def stream(self, model: ServedModel, translated: TranslatedRequest, dialect: Dialect) -> StreamResponse:
        """A streaming response; loading, rendering and queueing all happen inside it, behind early headers."""
        progress = PrefillProgress()
        headers = {**request_id(), **ignored_header(translated.ignored)}
        keepalive = translated.keepalive or dialect.keepalive

        def said() -> bytes:
            progress.loaded = model.worker.progress
            return keepalive(progress)

        async def produce(outbox: Outbox) -> None:
            def begin(job: GenerationJob) -> ReplyWriter:
                headers.update(_about(translated, job))
                return translated.writer(outbox, job, progress)

            await self._generate(model, translated, progress, begin)

        return StreamResponse(
            produce,
            settings=self.settings,
            media_type=dialect.media_type,
            keepalive=said,
            frame_error=translated.frame_error or dialect.frame_error,
            error_body=dialect.error_body,
            headers=lambda: headers,
        )

    async def whole(self, request: Request, model: ServedModel, translated: TranslatedRequest) -> Response:
        """The reply in one piece: the stream, folded. Cancelled when the client leaves."""

        async def work() -> tuple[ReplyCollector, GenerationJob]:
            collectors: list[ReplyCollector] = []

            def begin(job: GenerationJob) -> ReplyWriter:
                collectors.append(ReplyCollector(job.choices))
                return collectors[0]

            job = await self._generate(model, translated, PrefillProgress(), begin)
            return collectors[0], job

        done = await unless_gone(request, work())
        if done is None:
            return Response(status_code=499)
        collected, job = done
        headers = {**request_id(), **_about(translated, job), "x-localllm-cache": collected.usage.cache_note}
        return JSONResponse(translated.whole(collected, job), headers=headers)

    async def job(self, task: ChatRequest | JobFactory, model: ServedModel, engine: EngineClient) -> GenerationJob:
        """What `task` makes the engine do. Raises RequestError and what rendering ends in."""
        if isinstance(task, ChatRequest):
            if engine.info.vision:
                task = replace(task, messages=await self.images.fetched(task.messages))
            task = await self.pdfs.read(task, sees=engine.info.vision)
            return await job_for(with_defaults(task, model.defaults), model, engine, self.recall, self.counts)
        return await task(engine)

    async def prompt(self, translated: TranslatedRequest, model: ServedModel) -> tuple[str, list[str]]:
        """The prompt of a conversation, and the names of what has no effect."""
        with model.lease():
            job = await self.job(translated.task, model, await model.engine())
        assert isinstance(job.prompt, str)
        return job.prompt, [*translated.ignored, *job.ignored]

    async def count(self, translated: TranslatedRequest, model: ServedModel) -> tuple[int, list[str]]:
        """How many tokens the prompt of a conversation has, and the names of what has no effect."""
        with model.lease():
            engine = await model.engine()
            job = await self.job(translated.task, model, engine)
            assert isinstance(job.prompt, str)
            counting = EngineWithImages(engine, job.images)
            tokens = await counting.tokenize(job.prompt, add_bos=job.add_bos)
            return len(tokens), [*translated.ignored, *job.ignored]

    def counted(self, model: ServedModel, keep_s: float | None = None) -> _Lease:
        """A block in which a request of `model` runs: it is counted, and its model kept; behind it for `keep_s`, where
        the client says so."""
        self.requests += 1
        return _Lease(self, model, keep_s)

    async def _generate(
        self,
        model: ServedModel,
        translated: TranslatedRequest,
        progress: PrefillProgress,
        begin: Callable[[GenerationJob], ReplyWriter],
    ) -> GenerationJob:
        with self.counted(model, translated.keep_s):
            engine = await model.engine()
            job = await self.job(translated.task, model, engine)
            _note(translated, job)
            writer = begin(job)
            if job.asked is not None:
                writer = ReasoningRecorder(writer, self.recall, job.asked)
            account = caller()
            job = replace(job, generation=replace(job.generation, tenant=account.name))
            spent: ReplyUsage | None = None
            try:
                spent = await run(engine, job, writer, progress)
            finally:
                # Of an answer that was broken off: what is known of it.
                known = spent or ReplyUsage(progress.done, progress.written, progress.cached)
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


def with_defaults(chat: ChatRequest, defaults: ModelDefaults) -> ChatRequest:
    """`chat` with what its model's preset says and the client does not: a system text, a thinking budget."""
    generation = chat.generation
    if generation.thinking_tokens is None and defaults.thinking_tokens is not None:
        generation = replace(generation, thinking_tokens=defaults.thinking_tokens)
    messages = chat.messages
    if defaults.system and not any(m["role"] in ("system", "developer") for m in messages):
        messages = [{"role": "system", "content": defaults.system}, *messages]
    return replace(chat, messages=messages, generation=generation)


def _about(translated: TranslatedRequest, job: GenerationJob) -> dict[str, str]:
    """Headers that say what was ignored, taken out of the prompt and left out of the conversation."""
    said = ignored_header([*translated.ignored, *job.ignored])
    if job.normalised:
        said["x-localllm-normalised"] = ",".join(job.normalised)
    if job.compacted:
        said["x-localllm-compacted"] = job.compacted
    return said


def _note(translated: TranslatedRequest, job: GenerationJob) -> None:
    ignored = ignored_header([*translated.ignored, *job.ignored])
    if ignored:
        log.info("ignored unknown fields: %s", ignored[IGNORED])
    if job.compacted:
        log.info("compacted a conversation: left out %s", job.compacted)
