"""The body of POST /v1/chat/completions, and its translation to a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from localllm.conversation.messages import flatten, normalise, unfinished
from localllm.conversation.tools.prompt import checked, choice_of, narrowed
from localllm.engine.messages import Sampling
from localllm.errors import RequestError
from localllm.server.dialects.fields import TRUNCATION, Effort, Limit, ReasonedFields, first_limit
from localllm.server.dialects.openai import chat_reply
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.collector import ReplyCollector
from localllm.server.generation.job import GenerationJob, PrefillProgress
from localllm.server.generation.prompt import ResponseOptions
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import TranslatedRequest


class StreamOptions(BaseModel):
    """`include_usage` sends one more chunk with the token counts."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatFields(ReasonedFields):
    """POST /v1/chat/completions."""

    messages: list[Any] = Field(description="roles system, developer, user, assistant, tool; text content")
    max_tokens: Limit | None = Field(None, description="default, and -1: the remaining window")
    max_completion_tokens: Limit | None = Field(None, description="the newer name of max_tokens")
    n_predict: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = Field(None, description="go on with the assistant's text at the end")
    add_generation_prompt: bool | None = Field(None, description="false: the same; true: a new answer")
    prediction: dict[str, Any] | None = Field(None, description="text expected in the answer: drafted from first")
    truncation: Literal["auto", "disabled"] | None = Field(None, description=TRUNCATION)

    def predicted(self) -> str:
        """The text of `prediction`; raises RequestError."""
        if self.prediction is None:
            return ""
        if self.prediction.get("type") != "content":
            raise RequestError("prediction.type must be content", param="prediction")
        return flatten(self.prediction.get("content"), "prediction.content")

    def continues(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether an assistant's text at the end is gone on with: yes, unless the client says otherwise. Raises
        RequestError where it asks for that and there is none."""
        wanted = self.continue_final_message or self.add_generation_prompt is False
        field = "continue_final_message" if self.continue_final_message else "add_generation_prompt"
        if wanted and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the answer is gone on with or new",
                param=field,
            )
        if wanted and not unfinished(messages):
            raise RequestError(
                f"{field} asks to go on with an answer, but the last message is no text of the assistant", param=field
            )
        return wanted or (self.continue_final_message is None and self.add_generation_prompt is None)

    def answer_tokens(self) -> int | None:
        return first_limit(self.max_completion_tokens, self.max_tokens, self.n_predict)

    def effort(self) -> str | None:
        """The reasoning effort asked for, in either spelling."""
        return self.reasoning_effort or (self.reasoning.level if self.reasoning else None)

    def alternatives(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


def translate(fields: ChatFields, model: ServedModel) -> TranslatedRequest:
    """A conversation, answered as chat.completion or its chunks."""

    def whole(collected: ReplyCollector, job: GenerationJob) -> dict[str, Any]:
        return chat_reply.whole(collected, model.name)

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> chat_reply.ChatChunks:
        return chat_reply.ChatChunks(
            outbox, model.name, n=job.choices, include_usage=wants_usage(fields.stream_options), compacted=job.compacted
        )

    default = model.sampling_for(fields.effort(), fields.chat_template_kwargs)
    chat, ignored = chat_request(fields, default)
    return TranslatedRequest(chat, whole, writer, tuple(ignored))


def chat_request(fields: ChatFields, default: Sampling) -> tuple[ChatRequest, list[str]]:
    """What `fields` asks for, and what of it has no effect. Raises RequestError for what is wrong whatever the model."""
    ignored: list[str] = []
    tools, choice = narrowed(fields.tool_choice, checked(fields.tools))
    messages = normalise(fields.messages, ignored)
    options = ResponseOptions(
        tools=tools,
        choice=choice_of(choice, tools),
        parallel=fields.parallel_tool_calls is not False,
        grammar=fields.constraint(fields.response_format),
        effort=fields.effort(),
        template_kwargs=fields.chat_template_kwargs,
        continues=fields.continues(messages),
    )
    compaction = fields.truncation == "auto"
    return ChatRequest(messages, fields.generation(default), options, fields.n or 1, compaction), ignored


def wants_usage(options: StreamOptions | None) -> bool:
    return bool(options and options.include_usage)
