"""Answers one request of any dialect: loads the model, makes the generation job, runs it, and
streams or collects the reply."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.conversation.prefix_reuse import ReasoningCache
from localllm.engine.worker.client import EngineClient
from localllm.errors import ContextLengthError, LocalLLMError, WorkerDiedError
from localllm.grammars.json_schema import enforceable
from localllm.server.generation.chat import (
    MOST_COUNTS,
    ChatRequest,
    KeptCounts,
    chat_job,
    count_tokens,
)
from localllm.server.generation.generate import run
from localllm.server.generation.image_fetching import ImageFetcher
from localllm.server.generation.job import (
    GenerationJob,
    PrefillProgress,
    Reply,
    ReplyUsage,
    ReplyWriter,
)
from localllm.server.generation.pdf_reading import PdfReader
from localllm.server.http.accounts import Accounts, PerCaller, caller, salt_of
from localllm.server.http.asgi import IGNORED, SEEDED, answer_headers, ignored_header, request_id
from localllm.server.http.json_body import worked
from localllm.server.http.settings import ServerSettings
from localllm.server.http.streaming import KeptStreams, Outbox, Produce, StreamResponse, unless_left
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.served import ModelDefaults, ModelStore
from localllm.server.models.unloading import KeepAlive
from localllm.server.sleep_inhibitor import Awake
from localllm_backends.control_text import without_marks

log = logging.getLogger("localllm.server")
JobFactory: TypeAlias = Callable[[EngineClient], Awaitable[GenerationJob]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API frames its streams, and the errors in them. `streams`: replies are streamed
    unless the client sends `stream: false`."""

    media_type: str
    frame_error: Callable[[LocalLLMError], bytes]
    keepalive: Callable[[PrefillProgress], bytes]
    streams: bool = False


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A request after its dialect has translated it.

    `task` makes the generation job. `body` builds a complete reply; `writer` streams it.
    `ignored` lists the names of fields without effect.
    `frame_error` and `keepalive` override those of the dialect.
    `keep_s`: seconds that the model stays loaded afterwards; None if the client did not send it.
    `stream_id`: a second name under which a kept stream can be found."""

    task: ChatRequest | JobFactory
    body: Callable[[Reply, GenerationJob], Any]
    writer: Callable[[Outbox, GenerationJob, PrefillProgress], ReplyWriter]
    ignored: tuple[str, ...] = ()
    frame_error: Callable[[LocalLLMError], bytes] | None = None
    keepalive: Callable[[PrefillProgress], bytes] | None = None
    keep_s: float | None = None
    stream_id: str = ""


class Server:
    """The state that all routes share. `store`: the store that clients may pull models to, or None
    if they may not pull."""

    def __init__(
        self, models: ModelRouter, settings: ServerSettings, store: ModelStore | None = None
    ) -> None:
        self.models = models
        self.settings = settings
        self.store = store
        self.accounts = Accounts(settings.keys, settings.api_key)
        self.reasoning = PerCaller(ReasoningCache)
        self.counts = KeptCounts(MOST_COUNTS)
        self.images = ImageFetcher(settings.image_hosts)
        self.pdfs = PdfReader()
        self.keep_alive = KeepAlive()
        self.awake = Awake.here(wanted=settings.keeps_awake)
        self.kept = KeptStreams(settings.kept_stream_s)
        self.requests = 0
        self.active = 0

    async def stream(
        self,
        model: ServedModel,
        translated: TranslatedRequest,
        dialect: Dialect,
        kept: tuple[str, bytes] | None = None,
    ) -> Response:
        """Return a streaming response. Loading, templating and queueing happen inside it, after the
        headers.

        `kept`: a key and a digest of the request. The stream is kept under the key when its client
        disconnects. The digest detects a different request under the same key."""
        progress = PrefillProgress()
        headers = answer_headers(translated.ignored)
        keepalive = dialect.keepalive
        # Events of a kept stream are numbered when they are written. Its keep-alives must be
        # comments, because an additional event would have no number.
        if translated.keepalive and kept is None:
            keepalive = translated.keepalive

        def progress_frame() -> bytes:
            progress.loaded = model.worker.progress
            return keepalive(progress)

        async def produce(outbox: Outbox) -> None:
            def begin(job: GenerationJob) -> ReplyWriter:
                headers.update(_headers(translated, job))
                return translated.writer(outbox, job, progress)

            await self._generate(model, translated, progress, begin)

        def response(produce: Produce) -> StreamResponse:
            return StreamResponse(
                produce,
                settings=self.settings,
                media_type=dialect.media_type,
                keepalive=progress_frame,
                frame_error=translated.frame_error or dialect.frame_error,
                headers=headers,
            )

        if kept is None:
            return response(produce)
        key, asked = kept
        stream = self.kept.make((key, translated.stream_id), asked, produce)

        def joined(after: int) -> StreamResponse:
            return response(partial(stream.follow, after=after))

        stream.answer = joined
        return joined(-1)

    async def complete(
        self, request: Request, model: ServedModel, translated: TranslatedRequest
    ) -> Response:
        """Return the reply as one body, collected from the stream. The request is cancelled if the
        client disconnects."""

        def without_writer(job: GenerationJob) -> ReplyWriter:
            return ReplyWriter()

        async def work() -> Response:
            job, reply = await self._generate(model, translated, PrefillProgress(), without_writer)
            headers = request_id() | _headers(translated, job)
            headers["x-localllm-cache"] = reply.usage.cache_note
            return JSONResponse(translated.body(reply, job), headers=headers)

        return await unless_left(request, work())

    async def job(
        self, task: ChatRequest | JobFactory, model: ServedModel, engine: EngineClient
    ) -> GenerationJob:
        """Return the generation job of `task`. Raises RequestError, and any error of the chat
        template."""
        if isinstance(task, ChatRequest):
            if engine.info.vision:
                task = replace(task, messages=await self.images.fetched(task.messages))
            task = await self.pdfs.read(task, sees=engine.info.vision)
            grammar, loose = await _enforceable(task.options.grammar)
            task = replace(task, options=replace(task.options, grammar=grammar))
            task = with_defaults(task, model.defaults)
            job = await chat_job(task, model, engine, self.reasoning.current(), self.counts)
        else:
            job = await task(engine)
            grammar, loose = await _enforceable(job.answer.grammar)
            job = replace(job, answer=replace(job.answer, grammar=grammar))
        if loose:
            return replace(job, ignored=(*job.ignored, *loose))
        return job

    async def prompt(
        self, translated: TranslatedRequest, model: ServedModel
    ) -> tuple[str, int, list[str]]:
        """Return the prompt of a conversation, its length in tokens, and the names of fields
        without effect."""
        with model.lease():
            engine = await model.engine()
            job = await self.job(translated.task, model, engine)
            assert isinstance(job.prompt, str)
            n_tokens = await count_tokens(engine, job.prompt, job.images, add_bos=job.add_bos)
            return without_marks(job.prompt), n_tokens, [*translated.ignored, *job.ignored]

    @contextmanager
    def serving(self, model: ServedModel, keep_s: float | None = None) -> Iterator[None]:
        """Context of one request to `model`: counts the request and keeps the model loaded.

        If an admin sends `keep_s`, the model stays loaded for that many seconds after the last
        request. If a prompt is too long, the error's hint names the context that fits on this
        machine."""
        self.requests += 1
        self.active += 1
        try:
            with self.awake.held(), model.lease():
                if keep_s is not None and caller().admin:
                    self.keep_alive.set(model.worker, keep_s)
                yield
        except ContextLengthError as error:
            error.hint = model.room_hint or error.hint
            raise
        finally:
            self.active -= 1

    async def _generate(
        self,
        model: ServedModel,
        translated: TranslatedRequest,
        progress: PrefillProgress,
        begin: Callable[[GenerationJob], ReplyWriter],
    ) -> tuple[GenerationJob, Reply]:
        with self.serving(model, translated.keep_s):
            engine = await model.engine()
            try:
                job = await self.job(translated.task, model, engine)
            except WorkerDiedError:
                engine = await model.engine()
                job = await self.job(translated.task, model, engine)
            writer = begin(job)
            account = caller()
            salt = salt_of(job.generation.salt)
            job = replace(job, generation=replace(job.generation, tenant=account.name, salt=salt))
            usage: ReplyUsage | None = None
            try:
                try:
                    reply = await run(engine, job, writer, progress)
                except WorkerDiedError:
                    # A reply that has begun cannot be started again.
                    if progress.written or job.answer.prefix or job.choices > 1:
                        raise
                    reply = await run(await model.engine(), job, writer, progress)
                usage = reply.usage
            finally:
                # For a cancelled or failed reply, the tokens counted so far are charged.
                usage = usage or ReplyUsage(progress.done, progress.written, progress.cached)
                account.charge(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            if job.asked is not None:
                cache = self.reasoning.current()
                for choice in reply.choices:
                    calls = [(call.name, call.arguments) for call in choice.begun_calls]
                    cache.remember(job.asked, choice.text, calls, choice.reasoning)
                    if job.hides_reasoning:
                        choice.thoughts.clear()
            return job, reply


async def _enforceable(
    grammar: tuple[str, str] | None,
) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    is_loose = grammar is not None and grammar[0] == "loose_schema"
    return await worked(partial(enforceable, grammar), takes_ms=is_loose)


def with_defaults(chat: ChatRequest, defaults: ModelDefaults) -> ChatRequest:
    """Return `chat` with the model's preset for values that the client did not send: the system
    prompt and the thinking budget."""
    generation = chat.generation
    if generation.thinking_tokens is None and defaults.thinking_tokens is not None:
        generation = replace(generation, thinking_tokens=defaults.thinking_tokens)
    messages = chat.messages
    if defaults.system and not any(m["role"] in ("system", "developer") for m in messages):
        messages = [{"role": "system", "content": defaults.system}, *messages]
    return replace(chat, messages=messages, generation=generation)


def _headers(translated: TranslatedRequest, job: GenerationJob) -> dict[str, str]:
    """Return the headers that list ignored fields, changes to the prompt, and the messages that
    compaction removed."""
    headers = ignored_header([*translated.ignored, *job.ignored])
    if headers:
        log.info("ignored unknown fields: %s", headers[IGNORED])
    if job.generation.sampling.seed is not None:
        headers[SEEDED] = "repeats alone; beside other requests near-ties may fall otherwise"
    if job.normalised:
        headers["x-localllm-normalised"] = ",".join(job.normalised)
    if job.compacted:
        log.info("compacted a conversation: left out %s", job.compacted)
        headers["x-localllm-compacted"] = job.compacted
    return headers
