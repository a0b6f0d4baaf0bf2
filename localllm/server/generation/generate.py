"""Runs a generation job on an engine and reports it to a ReplyWriter; the only reader of the engine's events."""

from __future__ import annotations

import asyncio
import json
import secrets
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
from localllm.server.generation.visible_tokens import VisibleTokens

# What models write between their reasoning and their answer.
_BEHIND_THOUGHT = "\n\n"


async def run(engine: EngineClient, job: GenerationJob, writer: ReplyWriter, progress: PrefillProgress) -> ReplyUsage:
    """Generate every choice of `job`; returns what they took together. Raises the LocalLLMError of the first choice
    that fails, after cancelling the others; cancelling this coroutine cancels the requests in the engine."""
    jobs = [replace(job, prompt=p, also=()) for p in (job.prompt, *job.also)]
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


async def _within_window(engine: EngineClient, request: Request) -> Request:
    """`max_tokens` is a limit, not a wish: agents send 32,000 whatever the window, so it is lowered to what is left.

    A token has at least one byte, so a short prompt needs no counting."""
    most, prompt = request.generation.max_tokens, request.prompt
    if most is None:
        return request
    size = len(prompt.encode()) + 1 if isinstance(prompt, str) else len(prompt)
    n_ctx = engine.info.n_ctx
    if size + most <= n_ctx and not request.images:
        return request
    if isinstance(prompt, str):
        prompt = await engine.tokenize(prompt, add_bos=request.add_bos, images=request.images)
    room = n_ctx - len(prompt)
    # Without any room the engine says so; how much was asked for is nothing that the client could mend.
    limit = None if room <= 0 else min(most, room)
    # Images stand in a prompt of text.
    return replace(_generating(request, max_tokens=limit), prompt=request.prompt if request.images else prompt)


async def _choice(
    engine: EngineClient, job: GenerationJob, choice: int, variant: int, writer: ReplyWriter, progress: PrefillProgress
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
        begun=answer.begun,
        images=job.images,
    )
    parser = None if answer.reply.plain else ReplyParser(answer.reply)
    voice = _ChoiceStream(writer, choice, progress, parser, frozenset(answer.marks) - {*job.generation.stop})
    before: Finish | None = None
    if answer.reasons_first:
        request, before = await _reason(engine, answer, request, voice)
        if request.generation.max_tokens == 0:
            return voice.finish(before if before.reason in CUT else replace(before, reason="length"))
    if answer.prefix:
        voice.hear(answer.prefix)
        behind = await _behind(engine, request, answer.prefix)
        request = replace(request, prompt=behind, add_bos=request.add_bos and isinstance(behind, str))
    if not answer.calls:
        return voice.finish(await voice.speak(engine, request, so_far=before))
    return voice.finish(_joined(before, await _with_calls(engine, answer, request, voice)))


async def _with_calls(engine: EngineClient, answer: AnswerPlan, request: Request, voice: _ChoiceStream) -> Finish:
    """Let the model write freely up to the opening of a call, then hold the call to its tool's schema."""
    stops = (*request.generation.stop, *answer.calls)
    free = _generating(request, stop=stops)
    said: list[str] = []
    end: Finish | None = None
    while True:
        end = await voice.speak(engine, free, said, end)
        start = answer.calls.get(end.stop or "")
        if start is None or end.reason in CUT:
            return end
        said.append(voice.hear(end.stop or ""))
        if voice.in_call:
            said.append(voice.hear(start.lead))
            rest = await _going_on(engine, request, said, end)
            try:
                strict = replace(_generating(rest, stop=(), ignore_eos=False), grammar=start.grammar)
                end = await voice.speak(engine, strict, said, end)
            except UnsupportedError:
                # A schema that no grammar can hold: the call comes as the model writes it.
                return await voice.speak(engine, rest, so_far=end)
            if end.reason in CUT:
                return end
            said.append(voice.hear(start.closing))
            # Small models repeat a call until the window is full: the same once more is the end, as is no call at all.
            if not (start.again and answer.reply.parallel) or not voice.new_call():
                return end
        rest = await _going_on(engine, request, said, end)
        if rest.generation.max_tokens == 0:
            return replace(end, reason="length")
        free = _generating(rest, stop=stops)


async def _going_on(engine: EngineClient, request: Request, said: list[str], so_far: Finish) -> Request:
    """`request` for what comes behind the words said so far."""
    prompt = await _behind(engine, request, "".join(said))
    return _rest(request, prompt, so_far)


def _rest(request: Request, prompt: str | list[int], so_far: Finish) -> Request:
    """`request` for what comes behind a part of its answer, which has ended its reasoning."""
    least = max(0, request.generation.min_tokens - so_far.usage.completion_tokens)
    rest = _generating(request, max_tokens=_left(request, so_far), min_tokens=least)
    add_bos = request.add_bos and isinstance(prompt, str)
    return replace(rest, prompt=prompt, add_bos=add_bos, goes_on=True, thinking=None)


def _thinking_limit(answer: AnswerPlan, tokens: int | None) -> ThinkingLimit | None:
    """A limit on the reasoning in this model's words; None where nobody set one, or the model has no reasoning."""
    if tokens is None or answer.reply.think is None:
        return None
    opening, closing = answer.reply.think
    # A format that marks everything says itself what follows.
    behind = "" if answer.reply.drops else _BEHIND_THOUGHT
    return ThinkingLimit(tokens, opening, closing, behind, opened=answer.reply.thinking)


async def _reason(
    engine: EngineClient, answer: AnswerPlan, request: Request, voice: _ChoiceStream
) -> tuple[Request, Finish]:
    """Let the model reason freely; returns the request for the constrained answer behind it, and how this ended."""
    assert answer.reply.think is not None
    closing = answer.reply.think[1]
    thought: list[str] = []
    stops = (*request.generation.stop, closing)
    free = replace(_generating(request, stop=stops, ignore_eos=False), grammar=None)
    end = await voice.speak(engine, free, thought)
    if end.reason in CUT:
        return _generating(request, max_tokens=0), end
    bridge = closing + _BEHIND_THOUGHT
    voice.hear(bridge)
    prompt = await _behind(engine, request, "".join(thought) + bridge)
    return _rest(request, prompt, end), end


def _generating(request: Request, **changes: Any) -> Request:
    """`request` with some fields of its Generation changed."""
    return replace(request, generation=replace(request.generation, **changes))


def _left(request: Request, so_far: Finish) -> int | None:
    """Tokens that may follow those generated so far; None = the remaining window."""
    most = request.generation.max_tokens
    return None if most is None else max(0, most - so_far.usage.completion_tokens)


async def _behind(engine: EngineClient, request: Request, text: str) -> str | list[int]:
    """The request's prompt with `text` behind it. BOS is decided by the original prompt, so ids carry it on."""
    if isinstance(request.prompt, str) and (request.images or not (request.add_bos and engine.info.adds_bos)):
        return request.prompt + text
    head = request.prompt
    if isinstance(head, str):
        return await engine.tokenize(head + text, add_bos=True)
    return head + await engine.tokenize(text)


def _joined(first: Finish | None, second: Finish) -> Finish:
    """The end of an answer made in two parts: the second part's prompt contains the first part."""
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
    """Reads one choice's events and tells the writer."""

    def __init__(
        self,
        writer: ReplyWriter,
        choice: int,
        progress: PrefillProgress,
        parser: ReplyParser | None,
        marks: frozenset[str],
    ) -> None:
        self._writer, self._choice, self._progress, self._parser = writer, choice, progress, parser
        self._marks = marks
        self._heard: list[str] | None = None
        self._reasoned = 0
        self._calls: list[str] = []
        self._tokens = VisibleTokens()
        self._arguments: list[str] = []  # of the last call
        self._known: set[str] = set()

    def new_call(self) -> bool:
        """True if the last call heard differs from all before it."""
        call = self._calls[-1] if self._calls else ""
        new = bool(call) and call not in self._known
        self._known.add(call)
        self._calls.clear()
        return new

    @property
    def in_call(self) -> bool:
        """True while what comes belongs to a tool call."""
        return self._parser is not None and self._parser.in_call

    def hear(self, text: str) -> str:
        """Read text that the model did not write itself; returns it."""
        if self._parser is not None:
            self._tell(self._parser.feed(text), ())
        else:
            self._writer.text(self._choice, text, ())
        return text

    async def speak(
        self, engine: EngineClient, request: Request, heard: list[str] | None = None, so_far: Finish | None = None
    ) -> Finish:
        """Generate; returns the engine's Finish, raises its Failure. `heard` collects the raw text. `so_far` is how the
        part of the answer in front of this one ended: the two are one, cut where the window has no room for more."""
        self._heard = heard
        end = await engine.listen(await _within_window(engine, request), self._event)
        if isinstance(end, Failure):
            error = by_code(end.code, end.message, hint=end.hint or None, counts=end.counts)
            if so_far is not None and isinstance(error, ContextLengthError):
                return replace(so_far, reason="length")
            raise error
        return _joined(so_far, end)

    def _event(self, event: Event) -> None:
        """Runs in the loop's read of the engine's pipe: once per token, so with as little as can be."""
        if type(event) is Text:
            self._progress.written += len(event.tokens)
            if self._heard is not None:
                self._heard.append(event.text)
            parser = self._parser
            if parser is not None:
                if parser.thinking:
                    self._reasoned += len(event.tokens)
                self._tell(parser.feed(event.text), event.logprobs)
            elif event.text or event.logprobs:
                self._writer.text(self._choice, event.text, event.logprobs)
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
            # The end of a turn in this format, and no text that the client asked for.
            end = replace(end, stop=None)
        calls, half = 0, False
        if self._parser is not None:
            # A client's stop text cuts as a limit does: it can stand in the middle of an argument.
            cut = end.reason != "stop" or end.stop is not None
            self._tell(self._parser.close(cut), ())
            half = cut and self._parser.calls > 0 and not _is_json("".join(self._arguments))
            calls = self._parser.calls - half
        said: Reason = "tool_calls" if calls else "stop"
        if end.reason == "length" or end.reason == "repetition":
            said = end.reason
        outcome = Outcome(said, ReplyUsage.of(end.usage, self._reasoned), end.timings, end.stop, half)
        self._writer.finish(self._choice, outcome)
        return outcome

    def _tell(self, deltas: list[Delta], logprobs: tuple[TokenLogprob, ...]) -> None:
        writer, choice, tokens = self._writer, self._choice, self._tokens
        tokens.hear(logprobs)
        for delta in deltas:
            if isinstance(delta, Content):
                writer.text(choice, delta.text, tokens.told(delta.text))
            elif isinstance(delta, ReasoningText):
                tokens.told(delta.text)
                writer.reasoning(choice, delta.text)
            elif isinstance(delta, CallStart):
                self._calls.append(delta.name)
                self._arguments = []
                writer.call_start(choice, delta.index, delta.name)
            elif isinstance(delta, CallArguments):
                self._calls[-1] += delta.text
                self._arguments.append(delta.text)
                writer.call_arguments(choice, delta.index, delta.text)
        if self.in_call:
            tokens.forget()
