"""Read the lines of an answer's stream, from any server, as events.

Texts and tool calls must have the right shape: an error names the part that does not. A figure
without a usable value is read as a figure that the server does not send.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from localllm.errors import LocalLLMError, ServerUnreachableError, by_code
from localllm.foreign_json import JsonPart, MalformedError, PieceJoiner, parse, well_formed
from localllm_tui.control.interfaces import ChatEngine
from localllm_tui.control.stream_events import (
    AnswerDone,
    AnswerTimings,
    AnswerUsage,
    IdenticalCalls,
    MessagesLeftOut,
    PromptProgress,
    StreamEvent,
    TextDelta,
    ToolCall,
    WaitNote,
)
from localllm_tui.control.thinking_tags import ThinkingTags

_PREFILL = re.compile(r"prefill\D+(\d{1,15})\s*/\s*(\d{1,15})(?!\d)")
_CACHE = re.compile(r"cache \d+/\d+ tokens; (.+)")
_IDENTICAL = re.compile(r"identical calls (.{1,200}) (\d{1,9}) times")
_LEFT_OUT = re.compile(r"compacted (\d{1,15}) messages, \d+ tokens")
# SSE comments that keep the connection open, or come at the end, are not shown.
_NO_NEWS = re.compile(r"|ping|keep-?alive|heartbeat|cache\b.*", re.IGNORECASE)
# Comments of our server, as they are shown.
_STATUS_TEXTS = {"loading": "loading the model", "queued, 0 ahead": "starting"}
# Where servers send the model's thinking; ours is first.
_THINKING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text", "thinking")
# The most characters of a comment, and of an error, that are shown.
_NOTE_CHARS = 200
_ERROR_CHARS = 2000


def start_again(engine: ChatEngine, *, in_chat: bool = True) -> str:
    """What the user can do if the server of `engine` is gone. `in_chat`: there are commands."""
    if not engine.where and in_chat:
        return "leave the chat: `localllm chat --continue` loads the model again"
    if not engine.where:
        return "run the same command again"
    hint = f"check the server at {engine.where}"
    own = "a model"
    if engine.ours:
        hint = "start it again with `localllm serve`"
        own = "the model"
    if in_chat:
        hint += f", or /own loads {own} in this chat"
    return hint


def malformed(error: MalformedError, hint: str = "") -> ServerUnreachableError:
    """The error for the user about an answer that can't be read."""
    return ServerUnreachableError(
        f"the server does not speak the OpenAI API: {error.message}", hint=hint or "ask again"
    )


class _CallInPieces:
    """A tool call as its pieces arrive."""

    def __init__(self) -> None:
        self._id = ""
        self._names: list[str] = []
        self._arguments: list[str] = []

    def add(self, piece: JsonPart) -> None:
        function = piece.get("function")
        self._id = piece.get("id").text() or self._id
        self._names.append(function.get("name").piece())
        self._arguments.append(function.get("arguments").piece())

    def is_other(self, piece: JsonPart) -> bool:
        """True if a piece begins another call: it has an id of its own, and a name."""
        own_id = piece.get("id").text()
        if not own_id or not self._id or own_id == self._id:
            return False
        return bool(piece.get("function").get("name").piece())

    def tool_call(self) -> ToolCall:
        name = well_formed("".join(self._names))
        return ToolCall(self._id, name, well_formed("".join(self._arguments)))


@dataclass(slots=True)
class AnswerReader:
    """The state of an answer after the lines of its stream so far. `hint`: for the error about a
    malformed line."""

    hint: str = ""
    reason: str = ""
    usage: AnswerUsage | None = None
    cache_miss: str = ""
    timings: AnswerTimings | None = None
    _streams: bool = False  # False for a server that sends the whole message at once
    _calls: list[_CallInPieces] = field(default_factory=list)
    _call_at: dict[int, _CallInPieces] = field(default_factory=dict)  # the latest of each index
    _tags: ThinkingTags = field(default_factory=ThinkingTags)
    _text: PieceJoiner = field(default_factory=PieceJoiner)
    _thinking: PieceJoiner = field(default_factory=PieceJoiner)

    def comment(self, text: str) -> Iterator[StreamEvent]:
        noted = _CACHE.fullmatch(text)
        if noted:
            self.cache_miss = noted[1][:_NOTE_CHARS]
        prefill = _PREFILL.search(text)
        left_out = _LEFT_OUT.fullmatch(text)
        identical = _IDENTICAL.fullmatch(text)
        if prefill:
            yield PromptProgress(int(prefill[1]), int(prefill[2]))
        elif left_out:
            yield MessagesLeftOut(int(left_out[1]))
        elif identical:
            yield IdenticalCalls(well_formed(identical[1]), int(identical[2]))
        elif not _NO_NEWS.fullmatch(text):
            yield WaitNote(_STATUS_TEXTS.get(text, text)[:_NOTE_CHARS])

    def chunk(self, data: str, *, is_error: bool = False) -> Iterator[StreamEvent]:
        """Yield the events of a chunk of the stream. An empty chunk has no events. `is_error`: the
        chunk is an error by the name of its event.

        The well-formed parts before a malformed one are yielded before the error is raised.
        """
        try:
            yield from self._chunk(parse(data or "{}"), is_error)
        except MalformedError as e:
            raise malformed(e, self.hint) from e

    def _chunk(self, chunk: JsonPart, is_error: bool) -> Iterator[StreamEvent]:
        self._figures(chunk)
        for choice in chunk.get("choices").items():
            if choice.get("index").count():
                continue  # another answer to the same question
            delta = choice.get("delta")
            if delta.value is not None:
                self._streams = True
            elif not self._streams:
                delta = choice.get("message")
            yield from self._delta(delta)
            self.reason = choice.get("finish_reason").text() or self.reason
        error = chunk.get("error")
        if error.value:
            raise error_of(error)
        if chunk.value and (is_error or chunk.get("object").value == "error"):
            raise error_of(chunk)

    def _figures(self, chunk: JsonPart) -> None:
        usage = chunk.get("usage")
        if usage.members():
            self.usage = _usage(usage)
        timings = chunk.get("timings")
        if timings.members():
            self.timings = _timings(timings)

    def _delta(self, delta: JsonPart) -> Iterator[StreamEvent]:
        for name in _THINKING_FIELDS:
            thought = delta.get(name)
            if thought.value:
                yield from self._thought(thought)
                break
        content = delta.get("content")
        if isinstance(content.value, list):
            for part in content.items():
                yield from self._part(part)
        else:
            yield from self._content_text(content)
        yield from self._content_text(delta.get("refusal"))
        for piece in delta.get("tool_calls").items():
            self._call(piece).add(piece)

    def _thought(self, thought: JsonPart) -> Iterator[StreamEvent]:
        thinking = self._thinking.feed(thought.piece())
        if thinking:
            yield TextDelta("", thinking)

    def _content_text(self, content: JsonPart) -> Iterator[StreamEvent]:
        thinking, text = self._tags.feed(self._text.feed(content.piece()))
        if thinking:
            yield TextDelta("", thinking)
        if text:
            yield TextDelta(text)

    def _part(self, part: JsonPart) -> Iterator[StreamEvent]:
        """The events of a part of a content that is a list. Only texts and thinking are known."""
        kind = part.get("type").text()
        if kind == "text":
            yield from self._content_text(part.get("text"))
        elif kind == "thinking":
            thought = part.get("thinking")
            if isinstance(thought.value, list):
                for inner in thought.items():
                    yield from self._thought(inner.get("text"))
            else:
                yield from self._thought(thought)

    def _call(self, piece: JsonPart) -> _CallInPieces:
        """The call that a piece belongs to. Some servers number all calls 0."""
        at = piece.get("index").index()
        call = self._call_at.get(at)
        if call is None or call.is_other(piece):
            call = _CallInPieces()
            self._calls.append(call)
            self._call_at[at] = call
        return call

    def end(self) -> Iterator[StreamEvent]:
        """Yield the last events. Raises ServerUnreachableError if the answer is incomplete."""
        thought, text = self._tags.feed(self._text.end())
        kept_thought, kept_text = self._tags.end()
        text += kept_text
        thinking = thought + kept_thought + self._thinking.end()
        if text or thinking:
            yield TextDelta(text, thinking)
        if not self.reason:
            raise ServerUnreachableError(
                "the server ended the answer before it was complete",
                hint=self.hint or "ask again",
            )
        for call in self._calls:
            yield call.tool_call()
        yield AnswerDone(self.reason, self.usage, self.cache_miss, self.timings)


def _usage(usage: JsonPart) -> AnswerUsage | None:
    prompt = usage.get("prompt_tokens").count()
    completion = usage.get("completion_tokens").count()
    if prompt is None and completion is None:
        return None
    details = JsonPart(usage.get("prompt_tokens_details").members())
    return AnswerUsage(prompt or 0, completion or 0, details.get("cached_tokens").count())


def _timings(timings: JsonPart) -> AnswerTimings:
    def number(name: str) -> float:
        return max(0.0, timings.get(name).number() or 0.0)

    return AnswerTimings(
        number("queued_ms") / 1e3,
        number("prompt_ms") / 1e3,
        int(number("prompt_n")),
        number("predicted_ms") / 1e3,
        int(number("predicted_steps")),
        int(number("draft_n")),
        int(number("draft_n_accepted")),
    )


def error_of(error: JsonPart) -> LocalLLMError:
    """The error that a server sent, of any shape."""
    members = JsonPart(error.members())
    if not members.value:
        return by_code("backend_error", well_formed(str(error.value))[:_ERROR_CHARS])
    message = well_formed(str(members.get("message").value or ""))[:_ERROR_CHARS]
    hint = members.get("hint").value
    if not isinstance(hint, str):
        hint = None
    else:
        hint = well_formed(hint)[:_ERROR_CHARS]
    code = str(members.get("code").value or "")
    sentence = message or "the server failed without saying why"
    return by_code(code, without_body_positions(sentence), hint=hint)


# Where in a request's body something is: messages[2].content[0].image_url.url, messages.2.content.
_SPOT = re.compile(
    r"\b(?:messages|input|tools)(?:\[\d+\]|\.\d+)(?:\.[a-z_]+|\[\d+\]|\.\d+)*(?::\s*|\s+)"
)


def without_body_positions(message: str) -> str:
    """A server's error message without the positions in the request's body, which the user did not
    write."""
    return _SPOT.sub("", message)
