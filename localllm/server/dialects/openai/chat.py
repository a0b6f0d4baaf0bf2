"""POST /v1/chat/completions: what a client may send, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from localllm.conversation.messages import flatten, normalise, unfinished
from localllm.conversation.tools.prompt import checked, choice_of
from localllm.engine.messages import Sampling
from localllm.errors import RequestError
from localllm.server.dialects.fields import (
    MAX_TOKENS,
    TRUNCATION,
    Budget,
    Count,
    Effort,
    ReasoningFields,
    SamplingFields,
    limit_of,
)
from localllm.server.dialects.openai import chat_reply
from localllm.server.generation.conversing import Ask
from localllm.server.generation.folding import Fold
from localllm.server.generation.job import PrefillProgress, Prepared
from localllm.server.generation.prompting import Wishes
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel
from localllm.server.serving import Order


class StreamOptions(BaseModel):
    """`include_usage` sends one more chunk with the token counts."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatFields(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[Any] = Field(description="roles system, developer, user, assistant, tool; text content")
    max_tokens: Count | None = Field(None, description="default: the remaining window")
    max_completion_tokens: Count | None = Field(None, description="the newer name of max_tokens")
    n_predict: Annotated[int, Field(ge=-2, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningFields | None = Field(None, description="`effort`, and `max_tokens` of reasoning at most")
    thinking_budget: Budget | None = Field(None, description="tokens of reasoning at most; -1 = no limit")
    thinking_token_budget: Budget | None = Field(None, description="another name of thinking_budget (vLLM)")
    thinking_budget_tokens: Budget | None = Field(None, description="another name of thinking_budget (llama.cpp)")
    reasoning_budget_tokens: Budget | None = Field(None, description="another name of thinking_budget (llama.cpp)")
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
        """The longest answer asked for; None = the remaining window."""
        for value in (self.max_completion_tokens, self.max_tokens, self.n_predict):
            if value is not None:
                return None if value < 0 else value
        return None

    def thinking_tokens(self) -> int | None:
        """The longest reasoning asked for, by the first of its names that is sent; None = no limit."""
        named = (self.thinking_budget, self.thinking_token_budget, self.thinking_budget_tokens)
        sent = (self.reasoning.max_tokens if self.reasoning else None, *named, self.reasoning_budget_tokens)
        return limit_of(next((n for n in sent if n is not None), None))

    def alternatives(self) -> int | None:
        """Alternatives per token to report; None = no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


def order(fields: ChatFields, model: ServedModel) -> Order:
    """A conversation, answered as chat.completion or its chunks."""

    def whole(fold: Fold, job: Prepared) -> dict[str, Any]:
        return chat_reply.whole(fold, model.name)

    def writer(outbox: Outbox, job: Prepared, progress: PrefillProgress) -> chat_reply.ChatChunks:
        return chat_reply.ChatChunks(
            outbox, model.name, n=job.choices, include_usage=wants_usage(fields.stream_options), compacted=job.compacted
        )

    return Order(ask_of(fields, model.sampling), whole, writer)


def ask_of(fields: ChatFields, default: Sampling) -> Ask:
    """What `fields` asks for. Raises RequestError for what is wrong whatever the model."""
    tools = checked(fields.tools)
    messages = normalise(fields.messages)
    wishes = Wishes(
        tools=tools,
        choice=choice_of(fields.tool_choice, tools),
        parallel=fields.parallel_tool_calls is not False,
        grammar=fields.constraint(fields.response_format),
        effort=fields.reasoning_effort or (fields.reasoning.level if fields.reasoning else None),
        template_kwargs=fields.chat_template_kwargs,
        continues=fields.continues(messages),
    )
    compaction = fields.truncation == "auto"
    return Ask(messages, fields.generation(default), wishes, fields.n or 1, compaction)


def wants_usage(options: StreamOptions | None) -> bool:
    """True when a stream shall end with the token counts."""
    return bool(options and options.include_usage)
