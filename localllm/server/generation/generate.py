"""Runs a generation job on an engine, reports it to a ReplyWriter and collects it; the only reader of
the engine's events. Log-probabilities go to visible text: reasoning, tool calls and markers get none."""

from __future__ import annotations

import asyncio
import codecs
import json
import secrets
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from localllm.conversation.reply import CallArguments, CallStart, Content, Delta, ReasoningText
from localllm.conversation.reply_parser import ReplyParser
from localllm.engine.messages import (
    Event,
    Failure,
    Finish,
    Prefill,
    Queued,
    Request,
    Text,
    ThinkingLimit,
    TokenLogprob,
)
from localllm.engine.worker.client import EngineClient
from localllm.errors import ContextLengthError, UnsupportedError, by_code
from localllm.server.generation.job import (
    CUT,
    AnswerPlan,
    CollectedCall,
    CollectedChoice,
    GenerationJob,
    Outcome,
    PrefillProgress,
    Reason,
    Reply,
    ReplyUsage,
    ReplyWriter,
)

# What is shown of a partial UTF-8 character, once it is known to stay one.
_BROKEN = "\ufffd"
Made = TypeVar("Made")


class VisibleTokens:
    """Tokens whose text has not been shown yet. Text is shown in order; some is delayed by the
    parser, some never shown."""

    def __init__(self) -> None:
        self._pending: deque[tuple[str, list[TokenLogprob]]] = deque()  # characters, and of what
        self._open = ""  # the rest of the last characters, beyond the text shown so far
        self._halves: list[TokenLogprob] = []  # that made no character yet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        for token in tokens:
            self._halves.append(token)
            piece = self._decoder.decode(token.text.encode("utf-8", "surrogateescape"))
            if piece:
                self._pending.append((piece, self._halves))
                self._halves = []

    def clear(self) -> None:
        """Drop them: their text belongs to no answer."""
        self._pending.clear()
        self._open = ""
        self._halves = []
        self._decoder.reset()

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """The tokens that `text` consists of; those before them are dropped, as their text is not
        shown."""
        text = text.removeprefix(self._open)
        self._open = ""
        taken: list[TokenLogprob] = []
        while text and self._pending:
            piece, tokens = self._pending.popleft()
            left = _unmatched(text, piece)
            if left is not None:
                text, self._open = left
                taken += tokens
        if text.startswith(_BROKEN):
            taken += self._halves
            self._halves = []
            self._decoder.reset()
        return tuple(taken)


def _unmatched(text: str, piece: str) -> tuple[str, str] | None:
    """What is left of a text that begins with `piece`, or of a `piece` that begins with the text;
    None where neither does. Blanks before a piece may not be shown."""
    for form in (piece, piece.lstrip()):
        if form and text.startswith(form):
            return text[len(form) :], ""
        if form and form.startswith(text):
            return "", form[len(text) :]
    return None


# What models write between reasoning and answer.
_AFTER_REASONING = "\n\n"
# Calls that are the same in every letter: with so many an answer ends.
_MOST_ALIKE = 4


async def all_of(works: Iterable[Coroutine[Any, Any, Made]]) -> list[Made]:
    """What each of `works` returns. The first that fails cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* Exception as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def run(
    engine: EngineClient, job: GenerationJob, writer: ReplyWriter, progress: PrefillProgress
) -> Reply:
    """Generate every choice of `job`. The first choice that fails cancels the others, and its
    LocalLLMError is raised; cancelling this coroutine cancels the engine's requests."""
    if job.choices > 1:
        choices_of = secrets.token_hex(8)
        job = replace(job, generation=replace(job.generation, choices_of=choices_of))
    jobs = [replace(job, prompt=p, also=()) for p in (job.prompt, *job.also)]
    choices = await all_of(
        _choice(engine, jobs[i // job.n], i, i % job.n, writer, progress)
        for i in range(job.choices)
    )
    usages = [choice.outcome.usage for choice in choices]
    spent = ReplyUsage(
        prompt_tokens=sum(u.prompt_tokens for u in usages[:: job.n]),
        completion_tokens=sum(u.completion_tokens for u in usages),
        cached_tokens=sum(u.cached_tokens for u in usages[:: job.n]),
        accepted_draft_tokens=sum(u.accepted_draft_tokens for u in usages),
        rejected_draft_tokens=sum(u.rejected_draft_tokens for u in usages),
        cache_miss=usages[0].cache_miss,
        reasoning_tokens=sum(u.reasoning_tokens for u in usages),
    )
    reply = Reply(choices, spent, choices[0].outcome.timings)
    writer.end(reply)
    return reply


async def _choice(
    engine: EngineClient,
    job: GenerationJob,
    choice: int,
    variant: int,
    writer: ReplyWriter,
    progress: PrefillProgress,
) -> CollectedChoice:
    generation = job.generation
    answer = job.answer
    seed = generation.sampling.seed
    if variant and seed is not None:
        generation = replace(generation, sampling=replace(generation.sampling, seed=seed + variant))
    if answer.marks and not generation.ignore_eos:
        generation = replace(generation, stop=(*generation.stop, *answer.marks))
    request = Request(
        secrets.token_hex(12),
        job.prompt,
        generation,
        grammar=answer.grammar,
        add_bos=job.add_bos,
        render_control=answer.control,
        thinking=_thinking_limit(answer, generation.thinking_tokens),
        answer_start=answer.begun,
        images=job.images,
    )
    stream = _ChoiceStream(engine, job, request, choice, writer, progress)
    if generation.max_tokens == 0:  # the prompt is computed, and nothing written
        await stream.generate(replace(request, grammar=None))
        return stream.finish()
    # A constraint waits for the end of the reasoning.
    if answer.reply.thinking and answer.reply.think and any((answer.grammar, answer.prefix)):
        closing = answer.reply.think[1]
        stops = (*generation.stop, closing)
        free = replace(_with_generation(request, stop=stops, ignore_eos=False), grammar=None)
        await stream.generate(free)
        request = await stream.rest(closing + _AFTER_REASONING)
    if answer.prefix:
        request = await stream.rest(answer.prefix)
    if answer.calls:
        await _generate_with_calls(answer, request, stream)
    else:
        await stream.generate(request)
    return stream.finish()


async def _generate_with_calls(answer: AnswerPlan, request: Request, stream: _ChoiceStream) -> None:
    """Generate freely up to the opening of a tool call, then constrain the call to its tool's
    schema, and so on."""
    stops = (*request.generation.stop, *answer.calls)
    while not stream.cut:
        end = await stream.generate(_with_generation(request, stop=stops))
        start = answer.calls.get(end.stop or "")
        if start is None or stream.cut:
            return
        stream.feed(end.stop or "")
        if stream.in_call:
            rest = await stream.rest(start.lead)
            try:
                strict = _with_generation(rest, stop=(), ignore_eos=False)
                await stream.generate(replace(strict, grammar=start.grammar))
            except UnsupportedError:
                # No grammar for this schema: the call comes as the model writes it.
                await stream.generate(rest)
                return
            if stream.cut:
                return
            stream.feed(start.closing)
            # Small models repeat a call until the context is full: that ends the answer, as does
            # none.
            if not (start.again and answer.reply.parallel) or not stream.new_call():
                return
        request = await stream.rest()


def _thinking_limit(answer: AnswerPlan, tokens: int | None) -> ThinkingLimit | None:
    """The limit on the reasoning with this model's markers; None without a limit or without
    reasoning."""
    if tokens is None or answer.reply.think is None:
        return None
    opening, closing = answer.reply.think
    # Formats that mark every part need nothing in between.
    between = "" if answer.reply.drops else _AFTER_REASONING
    return ThinkingLimit(tokens, opening, closing, between, opened=answer.reply.thinking)


def _with_generation(request: Request, **changes: Any) -> Request:
    """`request` with some fields of its Generation changed."""
    return replace(request, generation=replace(request.generation, **changes))


def _merge_ends(first: Finish | None, second: Finish) -> Finish:
    """Merges the ends of an answer generated in two parts; the second part's prompt contains the
    first."""
    if first is None:
        return second
    usage = first.usage
    more = second.usage
    early = first.timings
    late = second.timings
    return replace(
        second,
        usage=replace(
            usage,
            completion_tokens=usage.completion_tokens + more.completion_tokens,
            accepted_draft_tokens=usage.accepted_draft_tokens + more.accepted_draft_tokens,
            rejected_draft_tokens=usage.rejected_draft_tokens + more.rejected_draft_tokens,
        ),
        timings=replace(
            early,
            decode_s=early.decode_s + late.queued_s + late.prefill_s + late.decode_s,
            decode_steps=early.decode_steps + late.decode_steps,
        ),
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _ChoiceStream:
    """Generates one choice in parts, parses its events, reports them to the writer and collects
    them."""

    def __init__(
        self,
        engine: EngineClient,
        job: GenerationJob,
        request: Request,
        choice: int,
        writer: ReplyWriter,
        progress: PrefillProgress,
    ) -> None:
        self._engine = engine
        self._job = job
        self._request = request
        self._choice = choice
        self._writer = writer
        self._progress = progress
        reply = job.answer.reply
        self._parser = None if reply.plain else ReplyParser(reply)
        self._end: Finish | None = None  # of the parts so far
        self._raw: list[str] = []
        self._reasoned = 0
        self._tokens = VisibleTokens()
        self._collected = CollectedChoice()
        self._n_calls = 0  # when they were last asked for

    @property
    def cut(self) -> bool:
        """Whether the answer was cut off: nothing more is generated."""
        return self._end is not None and self._end.reason in CUT

    def new_call(self) -> bool:
        """Whether there was a tool call since this was last asked, and it is not one that is made
        over and over: the same dice may be thrown more than once."""
        said = [(call.name, call.arguments) for call in self._collected.begun_calls]
        before = self._n_calls
        self._n_calls = len(said)
        return len(said) > before and said.count(said[-1]) < _MOST_ALIKE

    @property
    def in_call(self) -> bool:
        """Whether the parser is inside a tool call."""
        return self._parser is not None and self._parser.in_call

    def feed(self, text: str) -> None:
        """Parse text that the model did not generate itself."""
        self._raw.append(text)
        if self._parser is not None:
            self._emit(self._parser.feed(text), ())
        else:
            self._show(text)

    async def rest(self, text: str = "") -> Request:
        """The request for the rest of the answer, behind `text` that the model did not write."""
        if self.cut:
            return self._request
        if text:
            self.feed(text)
        prompt = self._request.prompt
        raw = "".join(self._raw)
        tail = raw if isinstance(prompt, str) else await self._engine.tokenize(raw)
        spent = 0
        if self._end is not None:
            spent = self._end.usage.completion_tokens
        most = self._request.generation.max_tokens
        left = None if most is None else max(0, most - spent)
        if self._end is not None and left == 0:
            self._end = replace(self._end, reason="length")
        least = max(0, self._request.generation.min_tokens - spent)
        return replace(
            _with_generation(self._request, max_tokens=left, min_tokens=least),
            prompt=prompt + tail,  # type: ignore[operator]
            continues=self._end is not None,
            thinking=None,
        )

    async def generate(self, request: Request) -> Finish:
        """Generate a part; returns how the answer has ended so far. Raises the engine's Failure; if
        only the context has no room for more, the answer ends there. Of one that was cut off there
        is no further part."""
        if self._end is not None and self.cut:
            return self._end
        end = await self._engine.listen(request, self._event)
        if isinstance(end, Failure):
            error = by_code(end.code, end.message, hint=end.hint or None, counts=end.counts)
            if self._end is None or not isinstance(error, ContextLengthError):
                raise error
            self._end = replace(self._end, reason="length")
        else:
            self._end = _merge_ends(self._end, end)
        return self._end

    def _event(self, event: Event) -> None:
        """Called once per token while the event loop reads the engine's pipe: kept minimal."""
        if type(event) is Text:
            self._progress.written += len(event.tokens)
            if self._job.reports_tokens:
                self._collected.tokens += event.tokens
                self._writer.tokens(self._choice, event.tokens)
            self._raw.append(event.text)
            parser = self._parser
            if parser is not None:
                if parser.thinking:
                    self._reasoned += len(event.tokens)
                self._emit(parser.feed(event.text), event.logprobs)
            elif event.text or event.logprobs:
                self._tokens.add(event.logprobs)
                self._show(event.text)
        elif isinstance(event, Prefill):
            progress = self._progress
            progress.done = event.done
            progress.total = event.total
            progress.cached = event.cached
        elif isinstance(event, Queued):
            progress = self._progress
            progress.ahead = event.ahead
            if not progress.accepted:
                progress.accepted = True
                self._writer.start()

    def finish(self) -> CollectedChoice:
        assert self._end is not None
        end = self._end
        if end.stop in self._job.answer.marks and end.stop not in self._job.generation.stop:
            # The turn end of this format, not a stop string of the client's.
            end = replace(end, stop=None)
        calls = self._collected.begun_calls
        half_call = False
        if self._parser is not None:
            # A client's stop string may cut in the middle of an argument, as a limit does.
            cut = end.reason != "stop" or end.stop is not None
            self._emit(self._parser.close(cut), ())
            half_call = cut and bool(calls) and not _is_json(calls[-1].arguments)
        reason: Reason
        reason = "stop"
        if len(calls) > half_call:
            reason = "tool_calls"
        if end.reason == "length" or end.reason == "repetition":
            reason = end.reason
        usage = ReplyUsage(**asdict(end.usage), reasoning_tokens=self._reasoned)
        self._collected.outcome = Outcome(reason, usage, end.timings, end.stop, half_call)
        return self._collected

    def _show(self, text: str) -> None:
        logprobs = self._tokens.take(text)
        self._collected.texts.append(text)
        self._collected.logprobs += logprobs
        self._writer.text(self._choice, text, logprobs)

    def _emit(self, deltas: list[Delta], logprobs: tuple[TokenLogprob, ...]) -> None:
        writer = self._writer
        choice = self._choice
        collected = self._collected
        self._tokens.add(logprobs)
        for delta in deltas:
            if isinstance(delta, Content):
                self._show(delta.text)
            elif isinstance(delta, ReasoningText):
                self._tokens.take(delta.text)
                collected.thoughts.append(delta.text)
                if not self._job.hides_reasoning:
                    writer.reasoning(choice, delta.text)
            elif isinstance(delta, CallStart):
                collected.begun_calls.append(CollectedCall(delta.name))
                writer.call_start(choice, delta.index, delta.name)
            elif isinstance(delta, CallArguments):
                collected.begun_calls[delta.index].pieces.append(delta.text)
                writer.call_arguments(choice, delta.index, delta.text)
        if self.in_call:
            self._tokens.clear()
