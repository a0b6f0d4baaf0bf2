"""Compaction in the Responses API: a conversation becomes one `compaction` item, and the item takes
its place in later requests.

A client asks for it with POST /v1/responses/compact, or with a `compaction_trigger` as the last item
of a request. The server compacts only on request. The model summarises its own conversation, so the prompt
of the summary begins like that of the last answer and comes from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from localllm.conversation.messages import flatten
from localllm.conversation.summary import Summary, written
from localllm.engine.messages import TokenLogprob
from localllm.engine.worker.client import EngineClient
from localllm.errors import RequestError
from localllm.server.dialects.responses.events import ResponseEvents
from localllm.server.dialects.responses.items import COMPACTIONS, TRIGGER, messages_of
from localllm.server.dialects.wire import comment
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.job import GenerationJob, Reply
from localllm.server.generation.summarising import Receipt, Summarising
from localllm.server.http.accounts import caller
from localllm.server.http.asgi import new_id
from localllm.server.models.router import ServedModel
from localllm.server.sealed_text import seal, unseal
from localllm.server.serving import Server

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


def expanded(input_items: Sequence[Any]) -> Conversation:
    """Return the conversation in the items of a request.

    Of the items before the last compaction item, messages of the system and the user stay, because
    some clients begin their compacted conversation with them. The summary replaces the others.
    Raises RequestError."""
    own: list[Any] = []
    summary: Summary | None = None
    place = 0
    for item in input_items:
        kind = item.get("type")
        if kind in COMPACTIONS:
            summary = _summary_in(item)
            own = [message for message in own if message.get("role") in _STAYING]
            place = len(own)
        elif kind != TRIGGER:
            own.append(item)
    if summary is None:
        return Conversation(own, own)
    sent = [_text(message) for message in own if message.get("role") == "user"]
    block = {"type": "message", "role": "user", "content": summary.message(sent)}
    return Conversation([*own[:place], block, *own[place:]], own, summary)


def _text(message: Mapping[str, Any]) -> str:
    return flatten(message.get("content"), "input", omitted=[])


@dataclass(frozen=True, slots=True)
class Compaction:
    """The compaction of a conversation. `chat` asks for its next answer."""

    server: Server
    model: ServedModel
    chat: ChatRequest
    conversation: Conversation
    receipt: Receipt

    async def job(self, engine: EngineClient) -> GenerationJob:
        """Return the job that writes the summary, and fill the receipt. Raises RequestError."""
        make_job = partial(self.server.job, model=self.model, engine=engine)
        summarising = Summarising(self.chat, engine, make_job)
        job = await summarising.job()
        said = messages_of(self.conversation.own, [])
        texts = [{**message, "content": _text(message)} for message in said]
        await summarising.fill(self.receipt, texts, self.conversation.earlier)
        return job

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
    kept_fields = ("id", "created_at", "model", "output", "usage")
    return {**{name: response[name] for name in kept_fields}, "object": "response.compaction"}
