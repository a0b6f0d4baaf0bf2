"""POST /v1/chat/completions: the body, its translation to a chat request, and the answer in
OpenAI's format."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from localllm.conversation.messages import flatten, normalise, unfinished
from localllm.engine.messages import TokenLogprob
from localllm.errors import RequestError
from localllm.server.dialects.fields import Alternatives, Limit, SentTools, Truncation, first_limit
from localllm.server.dialects.known import PART, STREAMED, BodyPart, Shape
from localllm.server.dialects.thinking import ReasonedFields
from localllm.server.dialects.toolbox import INPUT, NO_TOOLS, CustomInputReader, Toolbox
from localllm.server.dialects.wire import (
    FINGERPRINT,
    LiveTelemetry,
    TelemetryFields,
    comment,
    logprob_entry,
    quote,
    timings_body,
)
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.job import (
    CollectedCall,
    CollectedChoice,
    GenerationJob,
    PrefillProgress,
    Reply,
    ReplyWriter,
)
from localllm.server.http.asgi import new_id
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import TranslatedRequest
from localllm_backends.control_text import without_marks


class StreamOptions(BodyPart):
    """`include_usage`: send one more chunk with the token counts."""

    shapes: ClassVar[Shape] = STREAMED
    include_usage: bool | None = None


class ChatFields(ReasonedFields, TelemetryFields):
    """POST /v1/chat/completions."""

    shapes: ClassVar[Shape] = {
        **ReasonedFields.shapes,
        "prediction": {"type": None, "content": PART},
    }
    messages: list[Any] = Field(
        description="roles: system, developer, user, assistant, tool; content: text or parts"
    )
    max_tokens: Limit | None = Field(None, description="default and -1: the rest of the context")
    max_completion_tokens: Limit | None = Field(None, description="the current name of max_tokens")
    n_predict: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    tools: SentTools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="true: continue the assistant's text in the last message"
    )
    add_generation_prompt: bool | None = Field(
        None, description="false: continue the last message; true: start a new answer"
    )
    prediction: dict[str, Any] | None = Field(
        None, description="text that the answer probably contains; it is drafted first"
    )
    truncation: Truncation = None
    verbose: bool | None = Field(
        None, description="true: `__verbose` has the prompt and llama.cpp's object (not in streams)"
    )

    def predicted(self) -> str:
        """Return the text of `prediction`. Raises RequestError."""
        if self.prediction is None:
            return ""
        if self.prediction.get("type") != "content":
            raise RequestError("prediction.type must be content", param="prediction")
        return flatten(self.prediction.get("content"), "prediction.content")

    def continues(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the answer continues a final assistant message; the default is yes. Raises
        RequestError if the client asks for it and the last message is not the assistant's text."""
        if self.continue_final_message:
            field = "continue_final_message"
        elif self.add_generation_prompt is False:
            field = "add_generation_prompt"
        else:
            return self.continue_final_message is None and self.add_generation_prompt is None
        if self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the first "
                "continues the last message, the second starts a new answer",
                param=field,
            )
        if not unfinished(messages):
            raise RequestError(
                f"{field} asks to continue an answer, but the last message is not "
                "a text of the assistant",
                param=field,
            )
        return True

    def alternatives(self) -> int | None:
        """Return the number of alternatives per token to report. None means no log-probabilities.
        Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.logprobs:
            return self.top_logprobs or 0
        return None


def translate(fields: ChatFields, model: ServedModel) -> TranslatedRequest:
    """Translate a chat. The reply is a chat.completion object, or its chunks."""
    toolbox = Toolbox.of(fields.tools)
    ignored = list(toolbox.skipped)
    messages = normalise(fields.messages, ignored)
    options = fields.response_options(
        toolbox,
        fields.tool_choice,
        fields.constraint(fields.response_format),
        parallel=fields.parallel_tool_calls is not False,
        continues=fields.continues(messages),
    )
    generation = fields.generation(
        model.sampling_for(options.effort),
        first_limit(fields.max_completion_tokens, fields.max_tokens, fields.n_predict),
        logprobs=fields.alternatives(),
        prediction=fields.predicted(),
        thinking_tokens=fields.thinking_tokens(),
    )
    chat = ChatRequest(messages, generation, options, fields.n or 1, fields.truncation == "auto")

    def body(reply: Reply, job: GenerationJob) -> dict[str, Any]:
        answer = chat_completion(reply, model.name, toolbox)
        if fields.verbose:
            answer["__verbose"] = {
                "prompt": without_marks(str(job.prompt)),
                "content": reply.choices[0].text,
                "timings": answer["timings"],
            }
        return answer

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ReplyWriter:
        telemetry = fields.telemetry(progress)
        return Chunks(outbox, model.name, job, toolbox, fields.stream_options, telemetry)

    return TranslatedRequest(chat, body, writer, tuple(ignored))


class Chunks(ReplyWriter):
    """Writes the events of OpenAI's streams: chat.completion.chunk, or the kind of a subclass.

    The constant parts are made once, so a token costs only one JSON string. `counts_in_choice`: the
    usage is in the last chunk of the last choice, and every chunk has a choice."""

    kind = "chat.completion.chunk"
    ids = "chatcmpl-"
    nothing = '"delta":{}'  # content of a choice's last chunk

    def __init__(
        self,
        outbox: Outbox,
        model: str,
        job: GenerationJob,
        toolbox: Toolbox = NO_TOOLS,
        options: StreamOptions | None = None,
        telemetry: LiveTelemetry | None = None,
        *,
        counts_in_choice: bool = False,
    ) -> None:
        self._outbox = outbox
        self._job = job
        self._toolbox = toolbox
        self._include_usage = options is not None and options.include_usage
        self._counts_in_choice = counts_in_choice
        self._inputs: dict[tuple[int, int], CustomInputReader] = {}
        begun = json.dumps(head(self.ids, self.kind, model), separators=(",", ":"))
        self._head = f"data: {begun[:-1]}"
        self._tail = ',"usage":null}\n\n' if self._include_usage else "}\n\n"
        self._telemetry = telemetry

    def end(self, reply: Reply) -> None:
        for i, choice in enumerate(reply.choices):
            if self._counts_in_choice and i == len(reply.choices) - 1:
                self._tail = f",{json.dumps(counted(reply))[1:]}\n\n"
            self._send(i, self.nothing, reason=f'"{choice.outcome.reason}"')
        if self._include_usage:
            data = json.dumps({"choices": [], **counted(reply)})
            self._outbox.write(f"{self._head},{data[1:]}\n\n".encode())
        self._outbox.write(f": cache {reply.usage.cache_note}\ndata: [DONE]\n\n".encode())

    def _send(
        self,
        choice: int,
        delta: str,
        logprobs: str = "null",
        reason: str = "null",
        more: str = "",
    ) -> None:
        self._outbox.write(
            f'{self._head},"choices":[{{"index":{choice},{delta},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}]{more}{self._tail}'.encode()
        )

    def prefill(self) -> None:
        if self._telemetry is not None:
            self._send_progress(self._telemetry.prefill_reports())

    def _send_progress(self, reports: Sequence[Mapping[str, int]]) -> None:
        for report in reports:
            self._send(0, self.nothing, more=f',"prompt_progress":{json.dumps(report)}')

    def _send_part(self, choice: int, delta: str, logprobs: str = "null") -> None:
        """Send a part of the answer, with the telemetry that the client wants."""
        more = ""
        if self._telemetry is not None:
            self._send_progress(self._telemetry.last_reports())
            timings = self._telemetry.timings()
            if timings is not None:
                more = f',"timings":{json.dumps(timings)}'
        self._send(choice, delta, logprobs, more=more)

    def start(self) -> None:
        for note in self._job.notes:
            self._outbox.write(comment(note))
        for i in range(self._job.choices):
            self._send(i, '"delta":{"role":"assistant","content":null}')

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        data = json.dumps(_logprobs(logprobs)) if logprobs else "null"
        self._send_part(choice, f'"delta":{{"content":{quote(text)}}}', data)

    def reasoning(self, choice: int, text: str) -> None:
        self._send_part(choice, f'"delta":{{"reasoning_content":{quote(text)}}}')

    def call_start(self, choice: int, index: int, name: str) -> None:
        if self._toolbox.called(name).custom:
            self._inputs[choice, index] = CustomInputReader()
            begun = f'"type":"custom","custom":{{"name":{quote(name)},"{INPUT}":""}}'
        else:
            begun = f'"type":"function","function":{{"name":{quote(name)},"arguments":""}}'
        self._call(choice, f'"index":{index},"id":"{new_id("call_")}",{begun}')

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        reader = self._inputs.get((choice, index))
        if reader is None:
            more = f'"function":{{"arguments":{quote(text)}}}'
        else:
            more = f'"custom":{{"{INPUT}":{quote(reader.feed(text))}}}'
        self._call(choice, f'"index":{index},{more}')

    def _call(self, choice: int, delta: str) -> None:
        self._send_part(choice, f'"delta":{{"tool_calls":[{{{delta}}}]}}')


def chat_completion(reply: Reply, model: str, toolbox: Toolbox = NO_TOOLS) -> dict[str, Any]:
    return {
        **head("chatcmpl-", "chat.completion", model),
        "choices": [_choice(i, c, toolbox) for i, c in enumerate(reply.choices)],
        **counted(reply),
    }


def _choice(index: int, choice: CollectedChoice, toolbox: Toolbox) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.calls and not choice.text:
        message["content"] = None
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [_call(call, toolbox) for call in choice.calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(choice.logprobs),
        "finish_reason": choice.outcome.reason,
    }


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {"content": [logprob_entry(p) for p in tokens], "refusal": None}


def _call(call: CollectedCall, toolbox: Toolbox) -> dict[str, Any]:
    if toolbox.called(call.name).custom:
        text = CustomInputReader().feed(call.arguments)
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, INPUT: text}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def head(ids: str, kind: str, model: str) -> dict[str, Any]:
    """Return the first fields of an answer, and of each event of a stream."""
    return {
        "id": new_id(ids),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def counted(reply: Reply) -> dict[str, Any]:
    """Return OpenAI's usage object and the timings. Its accepted and rejected prediction tokens are
    the engine's draft tokens."""
    usage = reply.usage
    body = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
        },
    }
    return {"usage": body, "timings": timings_body(usage, reply.timings)}
