"""Runs a generation job on an engine, reports it to a ReplyWriter and collects the result. This is
the only reader of the engine's events. Log-probabilities are reported only for visible text, not
for reasoning, tool calls or markers."""

from __future__ import annotations

import asyncio
import codecs
import json
import secrets
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from localllm.conversation.reply import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    ReasoningText,
    ReplyFormat,
)
from localllm.conversation.reply_parser import ReplyParser
from localllm.conversation.tools.readers import JsonEnd
from localllm.engine.messages import (
    Constraint,
    Event,
    Failure,
    Finish,
    HiddenSpan,
    Prefill,
    Queued,
    Reasoning,
    Request,
    Text,
    ThinkingLimit,
    TokenLogprob,
)
from localllm.engine.worker.client import EngineClient
from localllm.errors import by_code
from localllm.grammars.markers import NOT_QUOTED
from localllm.server.generation.job import (
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

# Shown for a partial UTF-8 character that will not be completed.
_REPLACEMENT_CHARACTER = "\ufffd"
T = TypeVar("T")


class VisibleTokens:
    """Tokens whose text has not been shown yet. Text is shown in order; the parser delays some of
    it and drops some."""

    def __init__(self) -> None:
        # characters, and their tokens
        self._pending: deque[tuple[str, list[TokenLogprob]]] = deque()
        self._open = ""  # decoded characters after the text shown so far
        self._incomplete: list[TokenLogprob] = []  # tokens that have not completed a character yet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        for token in tokens:
            self._incomplete.append(token)
            piece = self._decoder.decode(token.text.encode("utf-8", "surrogateescape"))
            if piece:
                self._pending.append((piece, self._incomplete))
                self._incomplete = []

    def clear(self) -> None:
        """Drop all tokens, because their text is not part of the answer."""
        self._pending.clear()
        self._open = ""
        self._incomplete = []
        self._decoder.reset()

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """Remove and return the tokens of `text`. Tokens before them are dropped, because their
        text is not shown."""
        text = text.removeprefix(self._open)
        self._open = ""
        shown_tokens: list[TokenLogprob] = []
        while text and self._pending:
            piece, tokens = self._pending.popleft()
            unmatched = _unmatched(text, piece)
            if unmatched is not None:
                text, self._open = unmatched
                shown_tokens += tokens
        if text.startswith(_REPLACEMENT_CHARACTER):
            shown_tokens += self._incomplete
            self._incomplete = []
            self._decoder.reset()
        return tuple(shown_tokens)


def _unmatched(text: str, piece: str) -> tuple[str, str] | None:
    """The rest of the text and the rest of `piece` after their common beginning; None if neither
    begins with the other. Spaces at the start of a piece may be missing from the text."""
    for form in (piece, piece.lstrip()):
        if form and text.startswith(form):
            return text[len(form) :], ""
        if form and form.startswith(text):
            return "", form[len(text) :]
    return None


# The text that models write between reasoning and answer.
_AFTER_REASONING = "\n\n"


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all `works`. If one fails, the others are cancelled and its exception is
    raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # The engine has released the request of each when its task has ended.
        await asyncio.gather(*tasks, return_exceptions=True)


async def run(
    engine: EngineClient, job: GenerationJob, writer: ReplyWriter, progress: PrefillProgress
) -> Reply:
    """Generate every choice of `job`. If a choice fails, the others are cancelled and its
    LocalLLMError is raised. Cancelling this coroutine cancels the engine's requests."""
    if job.choices > 1:
        choices_of = secrets.token_hex(8)
        job = replace(job, generation=replace(job.generation, choices_of=choices_of))
    jobs = [replace(job, prompt=p, also=()) for p in (job.prompt, *job.also)]
    choices = await all_of(
        _choice(engine, jobs[i // job.n], i, i % job.n, writer, progress)
        for i in range(job.choices)
    )
    usages = [choice.outcome.usage for choice in choices]
    # All choices of a prompt share that prompt, so it is counted once.
    prompts = usages[:: job.n]
    prompt_tokens = sum(u.prompt_tokens for u in prompts)
    cached_tokens = sum(u.cached_tokens for u in prompts)
    spent = ReplyUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(u.completion_tokens for u in usages),
        cached_tokens=cached_tokens,
        accepted_draft_tokens=sum(u.accepted_draft_tokens for u in usages),
        rejected_draft_tokens=sum(u.rejected_draft_tokens for u in usages),
        cache_miss=usages[0].cache_miss,
        reasoning_tokens=sum(u.reasoning_tokens for u in usages),
    )
    if usages[0].fetched_tokens:
        fetched_tokens = sum(u.fetched_tokens for u in prompts)
        spent = replace(spent, fetched_tokens=fetched_tokens, fetched_from=usages[0].fetched_from)
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
    if generation.max_tokens == 0:  # only the prompt is computed
        answer = replace(answer, grammar=None, prefix="", calls={})
    constraint = _constraint(answer)
    prompt = job.prompt
    prefix = ""
    if isinstance(prompt, str):
        prompt = prompt_with_prefix(prompt, answer)
        prefix = prompt[len(job.prompt) :]
    request = Request(
        secrets.token_hex(12),
        prompt,
        generation,
        constraint,
        add_bos=job.add_bos,
        render_control=answer.control,
        thinking=_thinking_limit(answer, generation.thinking_tokens),
        media=job.media,
        hidden=_hidden_spans(answer.reply) if generation.stop else (),
        shared=job.shared,
    )
    stream = _ChoiceStream(job, choice, writer, progress)
    if prefix:
        stream.feed(prefix)
    end = await engine.listen(request, stream.take)
    if isinstance(end, Failure):
        raise by_code(end.code, end.message, hint=end.hint or None, counts=end.counts)
    return stream.finish(end)


def prompt_with_prefix(prompt: str, answer: AnswerPlan) -> str:
    """The prompt with the forced beginning of a call. If the prompt opens the reasoning, the call
    begins after the reasoning instead."""
    constraint = _constraint(answer)
    if constraint is not None and constraint.lead:
        return prompt
    return prompt + answer.prefix


def _constraint(answer: AnswerPlan) -> Constraint | None:
    """The constraint that the engine applies to the answer; None for a free answer.

    If the prompt opens the reasoning, a grammar waits until the reasoning ends. Tool calls within
    reasoning are plain text. Only formats that mark every part of an answer let a call end the
    reasoning.
    """
    reply = answer.reply
    reasoning = None
    if reply.think is not None:
        reasoning = Reasoning(*reply.think, reply.thinking, may_call=reply.calls_in_reasoning)
    if answer.calls:
        triggers = {
            text: replace(
                trigger,
                again=trigger.again and reply.parallel,
                preceded_by=trigger.preceded_by or (NOT_QUOTED if reply.quotable else ""),
            )
            for text, trigger in answer.calls.items()
        }
        return Constraint(triggers=triggers, reasoning=None if reply.drops else reasoning)
    if answer.grammar is None:
        return None
    if reasoning is not None and reply.thinking:
        lead = _AFTER_REASONING + answer.prefix
        return Constraint(answer.grammar, lead=lead, reasoning=reasoning)
    return Constraint(answer.grammar, beginning=answer.beginning)


def _thinking_limit(answer: AnswerPlan, tokens: int | None) -> ThinkingLimit | None:
    """The limit on the reasoning, with this model's markers. None without a limit or without
    reasoning."""
    if tokens is None or answer.reply.think is None:
        return None
    opening, closing = answer.reply.think
    # Formats that mark every part need no text between the parts.
    between = "" if answer.reply.drops else _AFTER_REASONING
    return ThinkingLimit(tokens, opening, closing, between, opened=answer.reply.thinking)


def _hidden_spans(reply: ReplyFormat) -> tuple[HiddenSpan, ...]:
    """The reasoning and the structure of the format. Stop texts apply only to the answer."""
    spans: list[HiddenSpan] = []
    if reply.think is not None:
        opening, closing = reply.think
        marks_all = bool(reply.drops)
        spans.append(
            HiddenSpan(
                opening,
                closing,
                first=not marks_all,
                opened=reply.thinking,
                interruptible=marks_all,
            )
        )
    for drop in reply.drops:
        opening, closing = drop if isinstance(drop, tuple) else (drop, "")
        spans.append(HiddenSpan(str(opening), closing))
    if reply.lead:
        # The prompt ends with the beginning of the first marker.
        spans += [
            replace(span, opening=span.opening.removeprefix(reply.lead).lstrip(), first=True)
            for span in spans
            if span.opening.startswith(reply.lead) and span.opening != reply.lead
        ]
    return tuple(spans)


def _is_cut_off(arguments: str, was_stopped: bool) -> bool:
    """True if a call's arguments ended too early. Complete arguments may be invalid JSON, too."""
    if _is_json(arguments):
        return False
    return was_stopped or JsonEnd().feed(arguments) < 0


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _ChoiceStream:
    """Parses the events of one choice, reports them to the writer and collects them."""

    def __init__(
        self, job: GenerationJob, choice: int, writer: ReplyWriter, progress: PrefillProgress
    ) -> None:
        self._job = job
        self._choice = choice
        self._writer = writer
        self._progress = progress
        reply = job.answer.reply
        self._parser = None if reply.plain else ReplyParser(reply)
        self._reasoning_tokens = 0
        self._tokens = VisibleTokens()
        self._collected = CollectedChoice()

    def feed(self, text: str) -> None:
        """Parse text that the model did not generate itself."""
        if self._parser is not None:
            self._emit(self._parser.feed(text), ())
        else:
            self._show(text)

    def take(self, event: Event) -> None:
        """Handle one event. Called once per token while the event loop reads the engine's pipe, so
        it does as little as possible."""
        if type(event) is Text:
            self._progress.written += len(event.tokens)
            if self._job.reports_tokens:
                self._collected.tokens += event.tokens
                self._writer.tokens(self._choice, event.tokens)
            parser = self._parser
            if parser is not None:
                if parser.thinking:
                    self._reasoning_tokens += len(event.tokens)
                self._emit(parser.feed(event.text), event.logprobs)
            elif event.text or event.logprobs:
                self._tokens.add(event.logprobs)
                self._show(event.text)
        elif isinstance(event, Prefill):
            progress = self._progress
            progress.done = event.done
            progress.total = event.total
            progress.cached = event.cached
            self._writer.prefill()
        elif isinstance(event, Queued):
            progress = self._progress
            progress.ahead = event.ahead
            if not progress.accepted:
                progress.accepted = True
                self._writer.start()

    def finish(self, end: Finish) -> CollectedChoice:
        """The complete choice, after the engine's `end` event."""
        if end.stop in self._job.answer.marks and end.stop not in self._job.generation.stop:
            # The stop string is the turn end of this format, not one of the client's stop strings.
            end = replace(end, stop=None)
        calls = self._collected.started_calls
        incomplete_call = False
        if self._parser is not None:
            # A client's stop string or a limit may cut off a call within its arguments.
            was_stopped = end.reason != "stop" or end.stop is not None
            self._emit(self._parser.close(was_stopped), ())
            incomplete_call = bool(calls) and _is_cut_off(calls[-1].arguments, was_stopped)
        reason: Reason = "stop"
        if len(calls) > incomplete_call:
            reason = "tool_calls"
        if end.reason == "length" or end.reason == "repetition":
            reason = end.reason
        usage = ReplyUsage(**asdict(end.usage), reasoning_tokens=self._reasoning_tokens)
        self._collected.outcome = Outcome(reason, usage, end.timings, end.stop, incomplete_call)
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
                collected.started_calls.append(CollectedCall(delta.name))
                writer.call_start(choice, delta.index, delta.name)
            elif isinstance(delta, CallArguments):
                collected.started_calls[delta.index].pieces.append(delta.text)
                writer.call_arguments(choice, delta.index, delta.text)
        if self._parser is not None and self._parser.in_call:
            self._tokens.clear()
