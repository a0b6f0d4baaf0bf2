"""Answers one request of any dialect: loads the model, makes the generation job, runs it, and
streams or collects the reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from localllm.conversation.prefix_reuse import ReasoningCache
from localllm.engine.adapters import unknown_adapters
from localllm.engine.messages import Timings
from localllm.engine.worker.client import EngineClient
from localllm.errors import ContextLengthError, LocalLLMError, RequestError, WorkerDiedError
from localllm.grammars.loosening import enforceable
from localllm.server.generation.background_requests import RunningAgents, with_priority
from localllm.server.generation.chat import (
    MAX_COUNTS,
    ChatRequest,
    KeptCounts,
    chat_job,
    count_tokens,
)
from localllm.server.generation.generate import prompt_with_prefix, run
from localllm.server.generation.image_fetching import ImageFetcher
from localllm.server.generation.job import (
    GenerationJob,
    PrefillProgress,
    Reply,
    ReplyUsage,
    ReplyWriter,
    empty_reply,
)
from localllm.server.generation.length_check import check_fits, check_texts_fit
from localllm.server.generation.pdf_reading import PdfReader
from localllm.server.generation.sound_reading import AudioSupport, SoundReader
from localllm.server.generation.summarising import Summarising, answer_to_summary
from localllm.server.http.accounts import Accounts, PerCaller, caller, salt_of
from localllm.server.http.asgi import (
    IGNORED,
    LOGGED,
    SEEDED,
    answer_headers,
    header_text,
    ignored_header,
    request_id,
)
from localllm.server.http.json_body import process_body, release_body
from localllm.server.http.settings import ServerSettings
from localllm.server.http.streaming import (
    KeptStreams,
    Outbox,
    Produce,
    StreamResponse,
    respond_unless_disconnected,
)
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.served import ModelDefaults, ModelStore
from localllm.server.models.unloading import KeepAlive
from localllm.server.sleep_inhibitor import SleepInhibitor
from localllm.server.warming import Warming

log = logging.getLogger("localllm.server")
# Response header: what was left out of the conversation.
COMPACTED = "x-localllm-compacted"
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

    `task` makes the generation job. `body` builds a complete reply, an object or a plain text; `writer` streams
    it.
    `ignored` lists the names of fields without effect.
    `frame_error` and `keepalive` override those of the dialect.
    `keep_s`: seconds that the model stays loaded afterwards; None if the client did not send it.
    `stream_id`: a second name under which a kept stream can be found.
    `receipt`: headers of a complete reply that are known at its end."""

    task: ChatRequest | JobFactory
    body: Callable[[Reply, GenerationJob], Any]
    writer: Callable[[Outbox, GenerationJob, PrefillProgress], ReplyWriter]
    ignored: tuple[str, ...] = ()
    frame_error: Callable[[LocalLLMError], bytes] | None = None
    keepalive: Callable[[PrefillProgress], bytes] | None = None
    keep_s: float | None = None
    stream_id: str = ""
    receipt: Callable[[Reply], dict[str, str]] | None = None


@dataclass(slots=True)
class ReplyTotals:
    """Sums over all complete replies and embeddings since the server's start, for /metrics."""

    started_s: float = field(default_factory=time.time)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_s: float = 0.0
    predicted_tokens: int = 0
    predicted_s: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    longest_reply_tokens: int = 0
    embeddings: int = 0

    def add(self, usage: ReplyUsage, timings: Timings) -> None:
        self.prompt_tokens += usage.prompt_tokens - usage.cached_tokens
        self.cached_tokens += usage.cached_tokens
        self.prompt_s += timings.prefill_s
        self.predicted_tokens += usage.completion_tokens
        self.predicted_s += timings.decode_s
        self.draft_tokens += usage.accepted_draft_tokens + usage.rejected_draft_tokens
        self.accepted_tokens += usage.accepted_draft_tokens
        tokens = usage.prompt_tokens + usage.completion_tokens
        self.longest_reply_tokens = max(self.longest_reply_tokens, tokens)

    def add_embedding(self, n_tokens: int) -> None:
        self.prompt_tokens += n_tokens
        self.embeddings += 1


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
        self.counts = PerCaller(partial(KeptCounts, MAX_COUNTS))
        self.images = ImageFetcher(settings.image_hosts)
        self.pdfs = PdfReader()
        self.sounds = SoundReader()
        self.keep_alive = KeepAlive()
        self.awake = SleepInhibitor.for_this_machine(wanted=settings.keeps_awake)
        self.kept_streams = KeptStreams(settings.kept_stream_s)
        self.requests = 0
        self.active = 0
        # Set while no request runs.
        self.idle = asyncio.Event()
        self.idle.set()
        self.warming: Warming | None = None
        self.agents = RunningAgents()
        self.totals = ReplyTotals()

    async def stream(
        self,
        model: ServedModel,
        translated: TranslatedRequest,
        dialect: Dialect,
        stream_key: tuple[str, bytes] | None = None,
    ) -> Response:
        """Return a streaming response. Loading, templating and queueing happen inside it, after the
        headers.

        `stream_key`: a key and a digest of the request. The stream is kept under the key when its
        client disconnects. The digest detects a different request under the same key."""
        progress = PrefillProgress()
        headers = answer_headers(translated.ignored)
        keepalive = dialect.keepalive
        # Events of a kept stream are numbered when they are written. Its keep-alives must be
        # comments, because an additional event would have no number.
        if translated.keepalive and stream_key is None:
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

        if stream_key is None:
            return response(produce)
        key, digest = stream_key
        stream = self.kept_streams.make((key, translated.stream_id), digest, produce)

        def response_after(after: int) -> StreamResponse:
            return response(partial(stream.follow, after=after))

        stream.answer = response_after
        return response_after(-1)

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
            if translated.receipt is not None:
                headers |= translated.receipt(reply)
            body = translated.body(reply, job)
            if isinstance(body, str):
                return PlainTextResponse(body, headers=headers)
            return JSONResponse(body, headers=headers)

        return await respond_unless_disconnected(request, work())

    async def job(
        self, task: ChatRequest | JobFactory, model: ServedModel, engine: EngineClient
    ) -> GenerationJob:
        """Return the generation job of `task`. Raises RequestError, and any error of the chat
        template."""
        if isinstance(task, ChatRequest):
            if engine.info.vision:
                task = replace(task, messages=await self.images.fetched(task.messages))
            task = await self.sounds.read(task, self.audio_support(model, engine))
            task = await self.pdfs.read(task, vision=engine.info.vision)
            grammar, words = await _enforceable(task.options.grammar)
            loose = tuple(f"{task.options.grammar_field}.{word}" for word in words)
            task = replace(task, options=replace(task.options, grammar=grammar))
            task = with_defaults(task, model.defaults)
            cache = self.reasoning.current()
            counts = self.counts.current()
            job = await chat_job(task, model, engine, cache, counts)
            if self.warming is not None:
                await self.warming.note(task, model, engine)
        else:
            job = await task(engine)
            grammar, words = await _enforceable(job.answer.grammar)
            loose = tuple(f"response_format.{word}" for word in words)
            job = replace(job, answer=replace(job.answer, grammar=grammar))
        if loose:
            return replace(job, ignored=(*job.ignored, *loose))
        return job

    def audio_support(self, model: ServedModel, engine: EngineClient) -> AudioSupport:
        """Return whether a loaded model supports audio, and which other ones do."""
        rate_hz = engine.info.audio_rate_hz
        if rate_hz:
            return AudioSupport(model.name, rate_hz)
        others = [m.name for m in self.models.list() if m.supports_audio]
        return AudioSupport(model.name, 0, others)

    async def prompt(
        self, translated: TranslatedRequest, model: ServedModel
    ) -> tuple[GenerationJob, int, list[str]]:
        """Return the job of a conversation, the length of its prompt in tokens, and the names of
        fields without effect."""
        with model.lease():
            engine = await model.engine()
            job = await self.job(translated.task, model, engine)
            assert isinstance(job.prompt, str)
            prompt_text = prompt_with_prefix(job.prompt, job.answer)
            n_tokens = await count_tokens(engine, prompt_text, job.media, add_bos=job.add_bos)
            return job, n_tokens, [*translated.ignored, *job.ignored]

    @contextmanager
    def serving(self, model: ServedModel, keep_s: float | None = None) -> Iterator[None]:
        """Context of one request to `model`: counts the request and keeps the model loaded.

        If an admin sends `keep_s`, the model stays loaded for that many seconds after the last
        request. If a prompt is too long, the error's hint names the context that fits on this
        machine."""
        self.requests += 1
        self.active += 1
        self.idle.clear()
        if self.warming is not None:
            self.warming.stop()
        try:
            with self.awake.keep_awake(), model.lease():
                if keep_s is not None and caller().admin:
                    self.keep_alive.set(model.worker, keep_s)
                yield
        except ContextLengthError as error:
            error.hint = model.room_hint or error.hint
            raise
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    def _log_figures(self, model: ServedModel, usage: ReplyUsage, timings: Timings) -> None:
        """Add the figures of an answer to the request's line in the log."""
        figures = LOGGED.get()
        if figures is None:
            return
        speed = ""
        if timings.decode_s > 0:
            tok_s = max(0, usage.completion_tokens - 1) / timings.decode_s
            speed = f" at {tok_s:.1f} tokens/s"
        figures += [
            f"{usage.prompt_tokens:,} prompt tokens ({usage.cached_tokens:,} cached)",
            f"{usage.completion_tokens:,} output tokens{speed}",
            f"first token after {timings.ttft_s:.2f} s",
        ]
        if usage.accepted_draft_tokens:
            figures.append(f"{usage.accepted_draft_tokens:,} draft tokens accepted")
        if len(self.models.list()) > 1:
            figures.append(model.name)

    async def _generate(
        self,
        model: ServedModel,
        translated: TranslatedRequest,
        progress: PrefillProgress,
        begin: Callable[[GenerationJob], ReplyWriter],
    ) -> tuple[GenerationJob, Reply]:
        task = translated.task
        background = self.agents.is_background(task)
        with self.serving(model, translated.keep_s), self.agents.running(task):

            async def prepared(engine: EngineClient) -> GenerationJob:
                if isinstance(task, ChatRequest):
                    await check_fits(task, engine)
                job = await self.job(task, model, engine)
                if not isinstance(task, ChatRequest):
                    await _check_prompts_fit(job, engine)
                if isinstance(task, ChatRequest) and task.summary is not None:
                    job = await self._summarised(task, job, model, engine, background=background)
                return with_priority(job, background=background)

            engine = await model.engine()
            try:
                job = await prepared(engine)
            except WorkerDiedError:
                engine = await model.engine()
                job = await prepared(engine)
            release_body()
            writer = begin(job)
            if job.pauses:
                reply = empty_reply()
                writer.end(reply)
                return job, reply
            reply = await self._run(model, engine, job, writer, progress)
            if job.question is not None:
                cache = self.reasoning.current()
                for choice in reply.choices:
                    calls = [(call.name, call.arguments) for call in choice.started_calls]
                    cache.remember(job.question, choice.text, calls, choice.reasoning)
                    if job.hides_reasoning:
                        choice.thoughts.clear()
            return job, reply

    async def _summarised(
        self,
        task: ChatRequest,
        job: GenerationJob,
        model: ServedModel,
        engine: EngineClient,
        *,
        background: bool,
    ) -> GenerationJob:
        """Return `job`, or the job after a summary of its conversation."""
        assert task.summary is not None
        make_job = partial(self.job, model=model, engine=engine)

        async def write(summary: GenerationJob) -> Reply:
            waiting = with_priority(summary, background=background)
            return await self._run(model, engine, waiting, ReplyWriter(), PrefillProgress())

        summarising = Summarising(task, engine, make_job, task.summary.asks)
        return await answer_to_summary(task.summary, job, summarising, write)

    async def _run(
        self,
        model: ServedModel,
        engine: EngineClient,
        job: GenerationJob,
        writer: ReplyWriter,
        progress: PrefillProgress,
    ) -> Reply:
        """Run `job` for the caller, and charge the caller for its tokens."""
        account = caller()
        salt = salt_of(job.generation.salt)
        generation = replace(job.generation, tenant=account.name, salt=salt)
        job = replace(job, generation=model.adapters_for(generation))
        unknown = unknown_adapters(engine.info, job.generation.adapters)
        if unknown:
            hint = "GET /lora-adapters lists the adapters of a model"
            raise RequestError(f"lora: {unknown}", hint=hint, param="lora")
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
            self.totals.add(usage, reply.timings)
            self._log_figures(model, usage, reply.timings)
            return reply
        finally:
            # For a cancelled or failed reply, the tokens counted so far are charged.
            usage = usage or ReplyUsage(progress.done, progress.written, progress.cached)
            account.charge(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


async def _enforceable(
    grammar: tuple[str, str] | None,
) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    is_loose = grammar is not None and grammar[0] == "loose_schema"
    return await process_body(partial(enforceable, grammar), takes_ms=is_loose)


async def _check_prompts_fit(job: GenerationJob, engine: EngineClient) -> None:
    """Raise ContextLengthError if a prompt of `job` is a text that is far too long."""
    for prompt in (job.prompt, *job.also):
        if isinstance(prompt, str):
            await check_texts_fit([prompt], engine)


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
    """Return the headers that list ignored fields, changes to the prompt, the messages that
    compaction removed, repeated calls and a low priority."""
    headers = ignored_header([*translated.ignored, *job.ignored])
    if headers:
        log.info("ignored unknown fields: %s", headers[IGNORED])
    if job.generation.sampling.seed is not None:
        headers[SEEDED] = "repeatable only if no other request runs at the same time"
    if job.normalised:
        headers["x-localllm-normalised"] = ",".join(job.normalised)
    if job.compacted:
        log.info("compacted a conversation: omitted %s", job.compacted)
        headers[COMPACTED] = job.compacted
    if job.generation.priority < 0:
        headers["x-localllm-priority"] = "low"
    if job.repeated is not None:
        headers["x-localllm-identical-calls"] = header_text(str(job.repeated))
    return headers
