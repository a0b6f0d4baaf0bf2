"""Compaction in the Responses API: a conversation becomes one `compaction` item, and the item takes
its place in later requests.

A client asks for it with POST /v1/responses/compact, or with a `compaction_trigger` as the last item
of a request. The server compacts only on request. The model summarises its own conversation, so the prompt
of the summary begins like that of the last answer and comes from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.conversation import context_edits
from localllm.conversation.messages import flatten
from localllm.conversation.summary import Summary, left_of, task, written
from localllm.conversation.tools.prompt import Choice
from localllm.engine.messages import TokenLogprob
from localllm.engine.worker.client import EngineClient
from localllm.errors import RequestError
from localllm.server.dialects.responses.events import ResponseEvents
from localllm.server.dialects.responses.items import COMPACTIONS, TRIGGER, messages_of
from localllm.server.dialects.wire import comment
from localllm.server.generation.chat import ChatRequest, count_tokens
from localllm.server.generation.generate import begun_prompt
from localllm.server.generation.job import GenerationJob, Reply
from localllm.server.http.accounts import caller
from localllm.server.http.asgi import new_id
from localllm.server.models.router import ServedModel
from localllm.server.sealed_text import seal, unseal
from localllm.server.serving import Server

# The summary has at most this share of the context, and the user's messages in it as well.
_SUMMARY_SHARE = 4
_CHARS_PER_TOKEN = 2
# Roles of the messages before a compaction item that are still part of the conversation.
_STAYING = ("system", "developer", "user")


class NoSummaryError(RequestError, code="no_summary"):
    """The model wrote no summary."""


def is_triggered(items: Sequence[Any]) -> bool:
    """Return whether the request asks for a compaction of its items."""
    return bool(items) and items[-1].get("type") == TRIGGER


def _summary_in(item: Mapping[str, Any]) -> Summary:
    """Return the summary in a compaction item. Raises RequestError, always the same, if this server
    did not make the item for the caller."""
    text = unseal(item.get("encrypted_content"), caller().name)
    found = Summary.from_json(text) if text is not None else None
    if found is None:
        raise RequestError(
            "input: this server can't read the compaction item",
            hint="send the conversation itself, or compact it here, with the same key",
            param="input",
        )
    return found


@dataclass(frozen=True, slots=True)
class Conversation:
    """The items of a request. `items`: those for the model, with a message instead of the compaction
    item. `own`: the same without that message. `earlier`: the summary in the compaction item."""

    items: list[Any]
    own: list[Any]
    earlier: Summary | None = None


def expanded(given: Sequence[Any]) -> Conversation:
    """Return the conversation in the items of a request.

    Of the items before the last compaction item, messages of the system and the user stay, because
    some clients begin their compacted conversation with them. The summary replaces the others.
    Raises RequestError."""
    own: list[Any] = []
    summary: Summary | None = None
    place = 0
    for item in given:
        kind = item.get("type")
        if kind in COMPACTIONS:
            summary = _summary_in(item)
            own = [one for one in own if one.get("role") in _STAYING]
            place = len(own)
        elif kind != TRIGGER:
            own.append(item)
    if summary is None:
        return Conversation(own, own)
    sent = [_text(one) for one in own if one.get("role") == "user"]
    block = {"type": "message", "role": "user", "content": summary.message(sent)}
    return Conversation([*own[:place], block, *own[place:]], own, summary)


def _text(message: Mapping[str, Any]) -> str:
    return flatten(message.get("content"), "input", omitted=[])


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
class Compaction:
    """The compaction of a conversation. `chat` asks for its next answer."""

    server: Server
    model: ServedModel
    chat: ChatRequest
    conversation: Conversation
    receipt: Receipt

    async def job(self, engine: EngineClient) -> GenerationJob:
        """Return the job that writes the summary. If the conversation leaves no room for it, tool
        results are left out, the oldest first, and then the oldest turns. Raises RequestError."""
        share = engine.info.n_ctx // _SUMMARY_SHARE
        asked = self._asked(share)
        limit = engine.info.n_ctx - (asked.generation.max_tokens or share)
        job, size = await self._sized(asked, engine)
        keep = context_edits.tool_uses(asked.messages)
        while size > limit and keep:
            keep //= 2
            shorter, _ = context_edits.clear_tool_results(asked.messages, keep)
            job, size = await self._sized(replace(asked, messages=shorter), engine)
        if size > limit:
            shorter, _ = context_edits.clear_tool_results(asked.messages, 0)
            shortened = replace(asked, messages=shorter, compaction=True)
            job, _ = await self._sized(shortened, engine)
        await self._fill_receipt(engine)
        return job

    def _asked(self, share: int) -> ChatRequest:
        """Return the request for a summary of at most `share` tokens."""
        chat = self.chat
        sent = chat.generation
        limits = [tokens for tokens in (sent.max_tokens, share) if tokens]
        thinking = sent.thinking_tokens if sent.thinking_tokens is not None else share // 2
        generation = replace(
            sent, max_tokens=min(limits), thinking_tokens=thinking, stop=(), min_tokens=0
        )
        options = replace(chat.options, choice=Choice("none"), shows_tools=True, grammar=None)
        messages = [*chat.messages, {"role": "user", "content": task()}]
        return replace(chat, messages=messages, options=options, generation=generation)

    async def _sized(self, chat: ChatRequest, engine: EngineClient) -> tuple[GenerationJob, int]:
        """Return the job of `chat`, and the number of its prompt's tokens."""
        job = await self.server.job(chat, self.model, engine)
        assert isinstance(job.prompt, str)
        text = begun_prompt(job.prompt, job.answer)
        return job, await count_tokens(engine, text, job.media, add_bos=job.add_bos)

    async def _fill_receipt(self, engine: EngineClient) -> None:
        said = messages_of(self.conversation.own, [])
        texts = [{**message, "content": _text(message)} for message in said]
        budget_chars = engine.info.n_ctx * _CHARS_PER_TOKEN // _SUMMARY_SHARE
        left = left_of(texts, self.conversation.earlier, budget_chars)
        options = replace(self.chat.options, grammar=None)
        shown = replace(self.chat, options=options)
        head = [message for message in self.chat.messages if message["role"] == "system"]
        after = [*head, {"role": "user", "content": left.message()}]
        receipt = self.receipt
        receipt.left = left
        receipt.messages = len(self.chat.messages) - len(head)
        receipt.before_tokens = (await self._sized(shown, engine))[1]
        receipt.after_tokens = (await self._sized(replace(shown, messages=after), engine))[1]

    def item(self, reply: Reply) -> dict[str, Any]:
        """Return the compaction item. Raises NoSummaryError."""
        text = reply.choices[0].text
        if not text.strip():
            raise NoSummaryError(
                "the model wrote no summary of this conversation, so it was not compacted",
                hint="send a larger max_output_tokens, or use another model",
            )
        sealed = seal(written(self.receipt.left, text).as_json(), caller().name)
        return {"id": new_id("cmp_"), "type": "compaction", "encrypted_content": sealed}


class CompactionEvents(ResponseEvents):
    """Writes a response whose only item is a compaction. The summary itself is not shown. Set
    `compaction` before use."""

    compaction: Compaction
    _item_id = ""

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        self._begin()

    def reasoning(self, choice: int, text: str) -> None:
        self._begin()

    def call_start(self, choice: int, index: int, name: str) -> None:
        self._begin()

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        pass

    def _begin(self) -> None:
        if self._item_id:
            return
        self._item_id = new_id("cmp_")
        item = {"id": self._item_id, "type": "compaction", "encrypted_content": ""}
        self._event("response.output_item.added", {"output_index": 0, "item": item})
        place = {"item_id": self._item_id, "output_index": 0}
        self._event("response.compaction.compacting", place)

    def end(self, reply: Reply) -> None:
        item = self.compaction.item(reply)
        self._begin()
        item["id"] = self._item_id
        self._event("response.output_item.done", {"output_index": 0, "item": item})
        self.body["output"].append(item)
        self._outbox.write(comment(f"compacted {self.compaction.receipt.text(reply)}"))
        choice = reply.choices[0]
        # A summary that reached its limit is complete for the client.
        choice.outcome = replace(choice.outcome, reason="stop", incomplete_call=False)
        super().end(reply)


def compacted_body(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of /v1/responses/compact."""
    kept = ("id", "created_at", "model", "output", "usage")
    return {**{name: response[name] for name in kept}, "object": "response.compaction"}
