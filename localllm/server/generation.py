"""Runs one job on an engine and tells a Writer what happens: the only place that reads the engine's events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, cast

from localllm.conversation.reply import CallArguments, CallStart, Content, Delta, Reasoning, ReplyFormat, ReplyParser
from localllm.engine.api import Engine
from localllm.engine.messages import (
    Event,
    Failure,
    Finish,
    Prefill,
    Queued,
    Request,
    Sampling,
    Text,
    Timings,
    TokenLogprob,
    Usage,
)
from localllm.errors import BackendError, by_code

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Job:
    """`n` choices for `prompt` and for each prompt in `also` (text or token ids), independent of any dialect.

    `prefix` is the beginning of the answer that is already known (a forced call): it is put behind the prompt and read
    as if the model had written it. When the prompt leaves the model reasoning, `grammar` and `prefix` wait until it
    has finished. `ignored` names fields that have no effect on this model, `normalised` what was taken out of the
    prompt; `asked` is the turn that is answered, where the reasoning behind the answer is to be remembered.
    """

    prompt: str | list[int]
    also: tuple[str | list[int], ...] = ()
    add_bos: bool = True
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: tuple[str, str] | None = None
    cache_prompt: bool = True
    time_limit_s: float | None = None
    n: int = 1
    reply: ReplyFormat = field(default_factory=ReplyFormat)
    prefix: str = ""
    render_control: bool = False
    conversation: str = ""
    ignored: tuple[str, ...] = ()
    normalised: tuple[str, ...] = ()
    asked: str | None = None

    @property
    def choices(self) -> int:
        """How many choices the reply has."""
        return self.n * (1 + len(self.also))

    @property
    def reasons_first(self) -> bool:
        """True when the constraint must wait for the end of the reasoning."""
        return self.reply.thinking and (self.grammar is not None or bool(self.prefix))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one choice ended."""

    reason: Reason
    usage: Usage
    timings: Timings
    stop: str | None = None


class Writer(Protocol):
    """A dialect's way to write down a reply as it happens. Calls come in order: `start`, any number of the middle
    ones, one `finish` per choice, `end`; or `error` at any point, after which nothing comes."""

    def start(self) -> None:
        """The engine has taken the request."""

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """More of the answer."""

    def reasoning(self, choice: int, text: str) -> None:
        """More of the reasoning."""

    def call_start(self, choice: int, index: int, name: str) -> None:
        """A tool call begins."""

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """A fragment of its arguments."""

    def finish(self, choice: int, outcome: Outcome) -> None:
        """A choice ended."""

    def end(self, usage: Usage, timings: Timings) -> None:
        """Everything ended; the sums over the choices."""


@dataclass(slots=True)
class Progress:
    """Where a job stands, for keep-alive comments."""

    done: int = 0
    total: int = 0
    cached: int = 0
    ahead: int = 0
    accepted: bool = False

    def __str__(self) -> str:
        if self.total:
            return f"prefill {self.done}/{self.total} tokens, {self.cached} cached"
        return f"queued, {self.ahead} ahead" if self.accepted else "loading"


async def run(engine: Engine, job: Job, writer: Writer, progress: Progress) -> None:
    """Generate every choice of `job`. Raises the LocalLLMError of the first choice that fails, after cancelling the
    others; cancelling this coroutine cancels the requests in the engine."""
    jobs = [await _within_window(engine, replace(job, prompt=p, also=())) for p in (job.prompt, *job.also)]
    if job.choices == 1:
        outcomes = [await _choice(engine, jobs[0], 0, 0, writer, progress)]
    else:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_choice(engine, jobs[i // job.n], i, i % job.n, writer, progress))
                    for i in range(job.choices)
                ]
        except* Exception as failures:
            raise failures.exceptions[0] from None
        outcomes = [t.result() for t in tasks]
    usages = [o.usage for o in outcomes]
    writer.end(
        Usage(
            prompt_tokens=sum(u.prompt_tokens for u in usages[:: job.n]),
            completion_tokens=sum(u.completion_tokens for u in usages),
            cached_tokens=sum(u.cached_tokens for u in usages[:: job.n]),
            accepted_draft_tokens=sum(u.accepted_draft_tokens for u in usages),
            rejected_draft_tokens=sum(u.rejected_draft_tokens for u in usages),
            cache_miss=usages[0].cache_miss,
        ),
        outcomes[0].timings,
    )


async def _within_window(engine: Engine, job: Job) -> Job:
    """`max_tokens` is a limit, not a wish: agents send 32,000 whatever the window, so it is lowered to what is left.

    A token has at least one byte, so a short prompt needs no counting."""
    if job.max_tokens is None:
        return job
    size = len(job.prompt.encode()) + 1 if isinstance(job.prompt, str) else len(job.prompt)
    n_ctx = engine.info.n_ctx
    if size + job.max_tokens <= n_ctx:
        return job
    tokens = job.prompt
    if isinstance(tokens, str):
        tokens = await engine.tokenize(tokens, add_bos=job.add_bos)
    room = n_ctx - len(tokens)
    if room <= 0 or job.max_tokens <= room:
        return replace(job, prompt=tokens)
    return replace(job, prompt=tokens, max_tokens=room)


async def _choice(engine: Engine, job: Job, choice: int, variant: int, writer: Writer, progress: Progress) -> Outcome:
    sampling = job.sampling
    if variant and sampling.seed is not None:
        sampling = replace(sampling, seed=sampling.seed + variant)
    request = Request(
        id=secrets.token_hex(12),
        prompt=job.prompt,
        max_tokens=job.max_tokens,
        sampling=sampling,
        stop=job.stop,
        ignore_eos=job.ignore_eos,
        logprobs=job.logprobs,
        grammar=job.grammar,
        cache_prompt=job.cache_prompt,
        add_bos=job.add_bos,
        time_limit_s=job.time_limit_s,
        render_control=job.render_control,
        conversation=job.conversation,
    )
    voice = _Voice(writer, choice, progress, None if job.reply.plain else job.reply.parser())
    before = Usage()
    if job.reasons_first:
        request, before = await _reason(engine, job, request, voice)
        if request.max_tokens == 0:
            return voice.finish("length", before, Timings(), None)
    if job.prefix:
        voice.hear(job.prefix)
        request = replace(request, prompt=await _behind(engine, request, job.prefix), add_bos=False)
    end = await voice.speak(engine, request)
    return voice.finish(end.reason, _together(before, end.usage), end.timings, end.stop)


async def _reason(engine: Engine, job: Job, request: Request, voice: _Voice) -> tuple[Request, Usage]:
    """Let the model reason freely; returns the request for the constrained answer behind it."""
    assert job.reply.think is not None
    closing = job.reply.think[1]
    thought: list[str] = []
    free = replace(request, id=request.id + "t", grammar=None, stop=(*request.stop, closing), ignore_eos=False)
    end = await voice.speak(engine, free, thought)
    left = None if request.max_tokens is None else max(0, request.max_tokens - end.usage.completion_tokens)
    if end.reason == "length":
        return replace(request, max_tokens=0), end.usage
    bridge = closing + "\n\n"
    voice.hear(bridge)
    prompt = await _behind(engine, request, "".join(thought) + bridge)
    return replace(request, prompt=prompt, add_bos=False, max_tokens=left), end.usage


async def _behind(engine: Engine, request: Request, text: str) -> str | list[int]:
    """The request's prompt with `text` behind it. BOS is decided by the original prompt, so ids carry it on."""
    if isinstance(request.prompt, str) and not (request.add_bos and engine.info.adds_bos):
        return request.prompt + text
    head = request.prompt
    if isinstance(head, str):
        return await engine.tokenize(head + text, add_bos=True)
    return head + await engine.tokenize(text)


def _together(first: Usage, second: Usage) -> Usage:
    """The usage of an answer made in two parts: the second part's prompt contains the first part."""
    if not first.prompt_tokens:
        return second
    return replace(
        first,
        completion_tokens=first.completion_tokens + second.completion_tokens,
        accepted_draft_tokens=first.accepted_draft_tokens + second.accepted_draft_tokens,
        rejected_draft_tokens=first.rejected_draft_tokens + second.rejected_draft_tokens,
    )


class _Voice:
    """Reads one choice's events and tells the writer."""

    def __init__(self, writer: Writer, choice: int, progress: Progress, parser: ReplyParser | None) -> None:
        self._writer, self._choice, self._progress, self._parser = writer, choice, progress, parser

    def hear(self, text: str) -> None:
        """Read text that the model did not write itself."""
        if self._parser is not None:
            self._tell(self._parser.feed(text), ())
        else:
            self._writer.text(self._choice, text, ())

    async def speak(self, engine: Engine, request: Request, heard: list[str] | None = None) -> Finish:
        """Generate; returns the engine's Finish, raises its Failure. `heard` collects the raw text."""
        writer, choice, parser, progress = self._writer, self._choice, self._parser, self._progress
        stream = cast("AsyncGenerator[Event, None]", engine.submit(request))
        async with aclosing(stream) as events:
            async for event in events:
                if type(event) is Text:
                    if heard is not None:
                        heard.append(event.text)
                    if parser is not None:
                        self._tell(parser.feed(event.text), event.logprobs)
                    elif event.text or event.logprobs:
                        writer.text(choice, event.text, event.logprobs)
                elif isinstance(event, Prefill):
                    progress.done, progress.total, progress.cached = event.done, event.total, event.cached
                elif isinstance(event, Queued):
                    progress.ahead = event.ahead
                    if not progress.accepted:
                        progress.accepted = True
                        writer.start()
                elif isinstance(event, Failure):
                    raise by_code(event.code, event.message, hint=event.hint or None)
                elif isinstance(event, Finish):
                    return event
        raise BackendError("the engine ended the request without saying why")

    def finish(self, reason: str, usage: Usage, timings: Timings, stop: str | None) -> Outcome:
        """The end of the choice."""
        calls = 0
        if self._parser is not None:
            self._tell(self._parser.close(), ())
            calls = self._parser.calls
        said: Reason = "length" if reason == "length" else "tool_calls" if calls else "stop"
        outcome = Outcome(said, usage, timings, stop)
        self._writer.finish(self._choice, outcome)
        return outcome

    def _tell(self, deltas: list[Delta], logprobs: tuple[TokenLogprob, ...]) -> None:
        writer, choice = self._writer, self._choice
        for delta in deltas:
            if isinstance(delta, Content):
                writer.text(choice, delta.text, logprobs)
                logprobs = ()
            elif isinstance(delta, Reasoning):
                writer.reasoning(choice, delta.text)
            elif isinstance(delta, CallStart):
                writer.call_start(choice, delta.index, delta.name)
            elif isinstance(delta, CallArguments):
                writer.call_arguments(choice, delta.index, delta.text)
