"""The model summarises its own conversation, so that the summary can replace the conversation.

The prompt of the summary begins like that of the last answer and comes from the cache.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from localllm.conversation import context_edits
from localllm.conversation.summary import Summary, left_of, task, written
from localllm.conversation.tools.prompt import Choice
from localllm.engine.worker.client import EngineClient
from localllm.server.generation.chat import ChatRequest, SummaryEdit, count_tokens
from localllm.server.generation.generate import prompt_with_prefix
from localllm.server.generation.job import GenerationJob, Reply, WrittenSummary

# The summary has at most this share of the context, and the user's messages in it as well.
_SUMMARY_SHARE = 4
_CHARS_PER_TOKEN = 2
# A conversation is summarised at the latest if its prompt has this share of the context.
_FULL = 0.75

JobMaker: TypeAlias = Callable[[ChatRequest], Awaitable[GenerationJob]]
Runner: TypeAlias = Callable[[GenerationJob], Awaitable[Reply]]


@dataclass(slots=True)
class Receipt:
    """What a compaction costs and saves. `before_tokens` and `after_tokens`: the conversation before
    and after it; the latter without the model's text. `left`: the summary without that text."""

    messages: int = 0
    before_tokens: int = 0
    after_tokens: int = 0
    left: Summary = field(init=False)

    def text(self, reply: Reply) -> str:
        """Return the receipt as one line."""
        usage = reply.usage
        after = self.after_tokens + usage.completion_tokens - usage.reasoning_tokens
        return (
            f"{self.messages} messages, {self.before_tokens - after} tokens; cost "
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
            f"{usage.completion_tokens} output tokens"
        )


@dataclass(frozen=True, slots=True)
class Summarising:
    """The summary of a conversation. `chat` asks for its next answer, and `make_job` makes the jobs.
    `asks`: the text that asks for the summary."""

    chat: ChatRequest
    engine: EngineClient
    make_job: JobMaker
    asks: str = field(default_factory=task)

    async def job(self) -> GenerationJob:
        """Return the job that writes the summary. If the conversation leaves no room for it, tool
        results are left out, the oldest first, and then the oldest turns. Raises RequestError."""
        n_ctx = self.engine.info.n_ctx
        share = n_ctx // _SUMMARY_SHARE
        request = self._summary_request(share)
        limit = n_ctx - (request.generation.max_tokens or share)
        job, n_tokens = await self._job_and_length(request)
        keep = context_edits.tool_uses(request.messages)
        while n_tokens > limit and keep:
            keep //= 2
            shorter, _ = context_edits.clear_tool_results(request.messages, keep)
            job, n_tokens = await self._job_and_length(replace(request, messages=shorter))
        if n_tokens > limit:
            shorter, _ = context_edits.clear_tool_results(request.messages, 0)
            job, _ = await self._job_and_length(replace(request, messages=shorter, compaction=True))
        return job

    def _summary_request(self, share: int) -> ChatRequest:
        """Return the request for a summary of at most `share` tokens."""
        chat = self.chat
        sent = chat.generation
        limits = [tokens for tokens in (sent.max_tokens, share) if tokens]
        thinking = sent.thinking_tokens if sent.thinking_tokens is not None else share // 2
        generation = replace(
            sent, max_tokens=min(limits), thinking_tokens=thinking, stop=(), min_tokens=0
        )
        options = replace(chat.options, choice=Choice("none"), shows_tools=True, grammar=None)
        messages = [*chat.messages, {"role": "user", "content": self.asks}]
        return replace(chat, messages=messages, options=options, generation=generation)

    async def _job_and_length(self, chat: ChatRequest) -> tuple[GenerationJob, int]:
        """Return the job of `chat`, and the number of its prompt's tokens."""
        job = await self.make_job(chat)
        return job, await prompt_tokens(job, self.engine)

    async def fill(
        self,
        receipt: Receipt,
        summarised_messages: Sequence[Mapping[str, Any]],
        earlier: Summary | None,
    ) -> None:
        """Fill the receipt. `summarised_messages`: the messages that the summary replaces.
        `earlier`: the summary that they follow."""
        budget_chars = self.engine.info.n_ctx * _CHARS_PER_TOKEN // _SUMMARY_SHARE
        left = left_of(summarised_messages, earlier, budget_chars)
        options = replace(self.chat.options, grammar=None)
        shown = replace(self.chat, options=options)
        head = system_messages(self.chat)
        messages_after = [*head, {"role": "user", "content": left.message()}]
        receipt.left = left
        receipt.messages = len(self.chat.messages) - len(head)
        receipt.before_tokens = (await self._job_and_length(shown))[1]
        receipt.after_tokens = (
            await self._job_and_length(replace(shown, messages=messages_after))
        )[1]


def system_messages(chat: ChatRequest) -> list[Mapping[str, Any]]:
    return [message for message in chat.messages if message["role"] == "system"]


async def prompt_tokens(job: GenerationJob, engine: EngineClient) -> int:
    """The number of tokens of a conversation's prompt."""
    assert isinstance(job.prompt, str)
    text = prompt_with_prefix(job.prompt, job.answer)
    return await count_tokens(engine, text, job.media, add_bos=job.add_bos)


async def answer_to_summary(
    edit: SummaryEdit, job: GenerationJob, summarising: Summarising, run: Runner
) -> GenerationJob:
    """Return the job of the next answer. It is `job`, or that of the answer to a summary, if the
    prompt of `job` exceeds the limit of `edit`. Raises RequestError."""
    chat = summarising.chat
    n_ctx = summarising.engine.info.n_ctx
    n_tokens = await prompt_tokens(job, summarising.engine)
    if n_tokens <= min(edit.above_tokens, int(n_ctx * _FULL)):
        return job
    reply = await run(await summarising.job())
    text = reply.choices[0].text
    if not text.strip():
        return replace(job, summary=WrittenSummary(None, reply.usage), pauses=edit.pauses)
    head = system_messages(chat)
    other_messages = [message for message in chat.messages if message["role"] != "system"]
    if edit.earlier is not None:
        del other_messages[0]
    receipt = Receipt()
    await summarising.fill(receipt, other_messages, edit.earlier)
    summary = written(receipt.left, text)
    message = {"role": "user", "content": summary.message(answer_follows=True)}
    answer = await summarising.make_job(replace(chat, messages=[*head, message]))
    return replace(
        answer,
        summary=WrittenSummary(summary, reply.usage),
        pauses=edit.pauses,
        compacted=receipt.text(reply),
        applied=job.applied,
        original_tokens=job.original_tokens,
    )
