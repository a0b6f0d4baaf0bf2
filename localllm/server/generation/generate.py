"""Runs a generation job on an engine and reports it to a ReplyWriter; the only reader of the engine's
events. Log-probabilities go to visible text: reasoning, tool calls and markers get none."""

from __future__ import annotations

import asyncio
import codecs
import json
import secrets
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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
    GenerationJob,
    Outcome,
    PrefillProgress,
    Reason,
    ReplyUsage,
    ReplyWriter,
)

# What is shown of a partial UTF-8 character, once it is known to stay one.
_BROKEN = "\ufffd"


class VisibleTokens:
    """Tokens whose text has not been shown yet. Text is shown in order; some is delayed by the
    parser, some never shown."""

    def __init__(self) -> None:
        self._pending: deque[TokenLogprob] = deque()
        self._open = ""  # the rest of the last token, beyond the text shown so far
        self._halves: list[TokenLogprob] = []  # that made no character yet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        self._pending.extend(tokens)

    def clear(self) -> None:
        """Drop them: their text belongs to no answer."""
        self._pending.clear()
        self._open = ""
        self._drop_halves()

    def _drop_halves(self) -> None:
        self._halves = []
        self._decoder.reset()

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """The tokens that `text` consists of; those before them are dropped, as their text is not
        shown."""
        if self._open and text.startswith(self._open):
            text = text[len(self._open) :]
        self._open = ""
        taken: list[TokenLogprob] = []
        while text and self._pending:
            token = self._pending.popleft()
            self._halves.append(token)
            piece = self._decoder.decode(token.text.encode("utf-8", "surrogateescape"))
            if not piece:
                continue
            left = _unmatched(text, piece)
            if left is None:
                self._drop_halves()
                continue
            text, self._open = left
            taken += self._halves
            self._halves = []
        if self._halves and text.startswith(_BROKEN):
            taken += self._halves
            self._drop_halves()
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


async def run(
    engine: EngineClient, job: GenerationJob, writer: ReplyWriter, progress: PrefillProgress
) -> ReplyUsage:
    """Generate every choice of `job`; returns their usage together. The first choice that fails
    cancels the others, and its LocalLLMError is raised; cancelling this coroutine cancels the
    engine's requests."""
    if job.choices > 1:
        choices_of = secrets.token_hex(8)
        job = replace(job, generation=replace(job.generation, choices_of=choices_of))
    jobs = [replace(job, prompt=p, also=()) for p in (job.prompt, *job.also)]
    if job.choices == 1:
        outcomes = [await _choice(engine, jobs[0], 0, 0, writer, progress)]
    else:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        _choice(engine, jobs[i // job.n], i, i % job.n, writer, progress)
                    )
                    for i in range(job.choices)
                ]
        except* Exception as failures:
            raise failures.exceptions[0] from None
        outcomes = [t.result() for t in tasks]
    usages = [o.usage for o in outcomes]
    spent = ReplyUsage(
        prompt_tokens=sum(u.prompt_tokens for u in usages[:: job.n]),
        completion_tokens=sum(u.completion_tokens for u in usages),
        cached_tokens=sum(u.cached_tokens for u in usages[:: job.n]),
        accepted_draft_tokens=sum(u.accepted_draft_tokens for u in usages),
        rejected_draft_tokens=sum(u.rejected_draft_tokens for u in usages),
        cache_miss=usages[0].cache_miss,
        reasoning_tokens=sum(u.reasoning_tokens for u in usages),
    )
    writer.end(spent, outcomes[0].timings)
    return spent


async def _choice(
    engine: EngineClient,
    job: GenerationJob,
    choice: int,
    variant: int,
    writer: ReplyWriter,
    progress: PrefillProgress,
) -> Outcome:
    generation, answer = job.generation, job.answer
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
    parser = None if answer.reply.plain else ReplyParser(answer.reply)
    stream = _ChoiceStream(
        writer,
        choice,
        progress,
        parser,
        frozenset(answer.marks) - {*job.generation.stop},
        reports_tokens=job.reports_tokens,
    )
    before: Finish | None = None
    if generation.max_tokens == 0:  # the prompt is computed, and nothing written
        return stream.finish(await stream.generate(engine, replace(request, grammar=None)))
    # A constraint waits for the end of the reasoning.
    if answer.reply.thinking and any((answer.grammar, answer.prefix)):
        request, before = await _generate_reasoning(engine, answer, request, stream)
        if request.generation.max_tokens == 0:
            return stream.finish(
                before if before.reason in CUT else replace(before, reason="length")
            )
    if answer.prefix:
        stream.feed(answer.prefix)
        prompt = await _append_to_prompt(engine, request, answer.prefix)
        request = replace(request, prompt=prompt)
    if not answer.calls:
        return stream.finish(await stream.generate(engine, request, so_far=before))
    return stream.finish(
        _merge_ends(before, await _generate_with_calls(engine, answer, request, stream))
    )


async def _generate_with_calls(
    engine: EngineClient, answer: AnswerPlan, request: Request, stream: _ChoiceStream
) -> Finish:
    """Generate freely up to the opening of a tool call, then constrain the call to its tool's
    schema, and so on."""
    stops = (*request.generation.stop, *answer.calls)
    free = _with_generation(request, stop=stops)
    text: list[str] = []
    end: Finish | None = None
    while True:
        end = await stream.generate(engine, free, text, end)
        start = answer.calls.get(end.stop or "")
        if start is None or end.reason in CUT:
            return end
        text.append(stream.feed(end.stop or ""))
        if stream.in_call:
            text.append(stream.feed(start.lead))
            rest = await _continued(engine, request, text, end)
            try:
                strict = replace(
                    _with_generation(rest, stop=(), ignore_eos=False), grammar=start.grammar
                )
                end = await stream.generate(engine, strict, text, end)
            except UnsupportedError:
                # No grammar for this schema: the call comes as the model writes it.
                return await stream.generate(engine, rest, so_far=end)
            if end.reason in CUT:
                return end
            text.append(stream.feed(start.closing))
            # Small models repeat a call until the context is full: that ends the answer, as does
            # none.
            if not (start.again and answer.reply.parallel) or not stream.new_call():
                return end
        rest = await _continued(engine, request, text, end)
        if rest.generation.max_tokens == 0:
            return replace(end, reason="length")
        free = _with_generation(rest, stop=stops)


async def _continued(
    engine: EngineClient, request: Request, text: list[str], so_far: Finish
) -> Request:
    """`request` continued after the text generated so far."""
    prompt = await _append_to_prompt(engine, request, "".join(text))
    return _rest(request, prompt, so_far)


def _rest(request: Request, prompt: str | list[int], so_far: Finish) -> Request:
    """`request` for the rest of an answer whose reasoning has ended."""
    least = max(0, request.generation.min_tokens - so_far.usage.completion_tokens)
    most = request.generation.max_tokens
    left = None if most is None else max(0, most - so_far.usage.completion_tokens)
    rest = _with_generation(request, max_tokens=left, min_tokens=least)
    return replace(rest, prompt=prompt, continues=True, thinking=None)


def _thinking_limit(answer: AnswerPlan, tokens: int | None) -> ThinkingLimit | None:
    """The limit on the reasoning with this model's markers; None without a limit or without
    reasoning."""
    if tokens is None or answer.reply.think is None:
        return None
    opening, closing = answer.reply.think
    # Formats that mark every part need nothing in between.
    between = "" if answer.reply.drops else _AFTER_REASONING
    return ThinkingLimit(tokens, opening, closing, between, opened=answer.reply.thinking)


async def _generate_reasoning(
    engine: EngineClient, answer: AnswerPlan, request: Request, stream: _ChoiceStream
) -> tuple[Request, Finish]:
    """Generate the reasoning unconstrained; returns the request for the constrained answer, and how
    the reasoning ended."""
    assert answer.reply.think is not None
    closing = answer.reply.think[1]
    reasoning: list[str] = []
    stops = (*request.generation.stop, closing)
    free = replace(_with_generation(request, stop=stops, ignore_eos=False), grammar=None)
    end = await stream.generate(engine, free, reasoning)
    if end.reason in CUT:
        return _with_generation(request, max_tokens=0), end
    bridge = closing + _AFTER_REASONING
    stream.feed(bridge)
    prompt = await _append_to_prompt(engine, request, "".join(reasoning) + bridge)
    return _rest(request, prompt, end), end


def _with_generation(request: Request, **changes: Any) -> Request:
    """`request` with some fields of its Generation changed."""
    return replace(request, generation=replace(request.generation, **changes))


async def _append_to_prompt(engine: EngineClient, request: Request, text: str) -> str | list[int]:
    """The request's prompt with `text` appended."""
    if isinstance(request.prompt, str):
        return request.prompt + text
    return request.prompt + await engine.tokenize(text)


def _merge_ends(first: Finish | None, second: Finish) -> Finish:
    """Merges the ends of an answer generated in two parts; the second part's prompt contains the
    first."""
    if first is None:
        return second
    usage, more, early, late = first.usage, second.usage, first.timings, second.timings
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
    """Parses the events of one choice and reports them to the writer."""

    def __init__(
        self,
        writer: ReplyWriter,
        choice: int,
        progress: PrefillProgress,
        parser: ReplyParser | None,
        marks: frozenset[str],
        *,
        reports_tokens: bool,
    ) -> None:
        self._writer, self._choice, self._progress, self._parser = writer, choice, progress, parser
        self._marks, self._reports_tokens = marks, reports_tokens
        self._raw: list[str] | None = None
        self._reasoned = 0
        self._tokens = VisibleTokens()
        self._arguments: list[str] = []  # of the last call
        self._call = ""  # the last one, since it was asked for
        self._seen_calls: Counter[str] = Counter()

    def new_call(self) -> bool:
        """Whether there was a tool call since this was last asked, and it is not one that is made
        over and over: the same dice may be thrown more than once."""
        call, self._call = self._call, ""
        self._seen_calls[call] += 1
        return bool(call) and self._seen_calls[call] < _MOST_ALIKE

    @property
    def in_call(self) -> bool:
        """Whether the parser is inside a tool call."""
        return self._parser is not None and self._parser.in_call

    def feed(self, text: str) -> str:
        """Parse text that the model did not generate itself; returns it."""
        if self._parser is not None:
            self._emit(self._parser.feed(text), ())
        else:
            self._writer.text(self._choice, text, ())
        return text

    async def generate(
        self,
        engine: EngineClient,
        request: Request,
        raw: list[str] | None = None,
        so_far: Finish | None = None,
    ) -> Finish:
        """Generate; returns the engine's Finish, raises its Failure. `raw` collects the raw text.
        `so_far` is the end of the part of the answer before this one; if the context has no room
        for more, the answer ends there."""
        self._raw = raw
        end = await engine.listen(request, self._event)
        if isinstance(end, Failure):
            error = by_code(end.code, end.message, hint=end.hint or None, counts=end.counts)
            if so_far is not None and isinstance(error, ContextLengthError):
                return replace(so_far, reason="length")
            raise error
        return _merge_ends(so_far, end)

    def _event(self, event: Event) -> None:
        """Called once per token while the event loop reads the engine's pipe: kept minimal."""
        if type(event) is Text:
            self._progress.written += len(event.tokens)
            if self._reports_tokens:
                self._writer.tokens(self._choice, event.tokens)
            if self._raw is not None:
                self._raw.append(event.text)
            parser = self._parser
            if parser is not None:
                if parser.thinking:
                    self._reasoned += len(event.tokens)
                self._emit(parser.feed(event.text), event.logprobs)
            elif event.text or event.logprobs:
                self._tokens.add(event.logprobs)
                self._writer.text(self._choice, event.text, self._tokens.take(event.text))
        elif isinstance(event, Prefill):
            progress = self._progress
            progress.done, progress.total, progress.cached = event.done, event.total, event.cached
        elif isinstance(event, Queued):
            progress = self._progress
            progress.ahead = event.ahead
            if not progress.accepted:
                progress.accepted = True
                self._writer.start()

    def finish(self, end: Finish) -> Outcome:
        if end.stop in self._marks:
            # The turn end of this format, not a stop string of the client's.
            end = replace(end, stop=None)
        calls, half_call = 0, False
        if self._parser is not None:
            # A client's stop string may cut in the middle of an argument, as a limit does.
            cut = end.reason != "stop" or end.stop is not None
            self._emit(self._parser.close(cut), ())
            half_call = cut and self._parser.calls > 0 and not _is_json("".join(self._arguments))
            calls = self._parser.calls - half_call
        reason: Reason = "tool_calls" if calls else "stop"
        if end.reason == "length" or end.reason == "repetition":
            reason = end.reason
        outcome = Outcome(
            reason, ReplyUsage.of(end.usage, self._reasoned), end.timings, end.stop, half_call
        )
        self._writer.finish(self._choice, outcome)
        return outcome

    def _emit(self, deltas: list[Delta], logprobs: tuple[TokenLogprob, ...]) -> None:
        writer, choice, tokens = self._writer, self._choice, self._tokens
        tokens.add(logprobs)
        for delta in deltas:
            if isinstance(delta, Content):
                writer.text(choice, delta.text, tokens.take(delta.text))
            elif isinstance(delta, ReasoningText):
                tokens.take(delta.text)
                writer.reasoning(choice, delta.text)
            elif isinstance(delta, CallStart):
                self._call = delta.name
                self._arguments = []
                writer.call_start(choice, delta.index, delta.name)
            elif isinstance(delta, CallArguments):
                self._call += delta.text
                self._arguments.append(delta.text)
                writer.call_arguments(choice, delta.index, delta.text)
        if self.in_call:
            tokens.clear()
