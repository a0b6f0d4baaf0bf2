"""Fields that control whether and how long a model reasons, and whether the answer shows it.
Supports the names used by all makers of models and servers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from localllm.server.dialects.constraints import Constraint
from localllm.server.dialects.fields import (
    Budget,
    Count,
    Effort,
    RequestBody,
    SamplingFields,
    first_limit,
)
from localllm.server.dialects.known import (
    CHOICE,
    FORM,
    MESSAGE,
    TOOL,
    BodyPart,
    Shape,
    Unused,
    shape_of,
)
from localllm.server.dialects.toolbox import Toolbox
from localllm.server.generation.prompt import ResponseOptions

# For bodies that contain a conversation.
ParseSpecial = Annotated[
    bool | None,
    Field(
        description="true: control tokens spelled in messages and tools are read as such; "
        "otherwise they are text"
    ),
]
Summary = Literal["auto", "concise", "detailed"]


class ReasoningFields(BodyPart):
    """`reasoning` of OpenAI's Responses API and of OpenRouter."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = Field(
        None, description="tokens of reasoning at most; -1 = no limit"
    )
    exclude: bool | None = Field(None, description="true: reasoning is no part of the answer")
    summary: Summary | None = Field(
        None, description="the reasoning comes as summary parts; nothing is left out of it"
    )
    generate_summary: Summary | None = Field(None, description="the older name of summary")


class ThinkingSwitch(BodyPart):
    """`thinking` of Anthropic, DeepSeek and GLM."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: reasoning is no part of the answer"
    )


# For dialects without summaries of reasoning.
REASONING: Shape = {
    **shape_of(ReasoningFields),
    **dict.fromkeys(("summary", "generate_summary"), Unused(off=(None,))),
}


class ThinkingFields(RequestBody):
    """Body of a chat: whether and how long the model reasons and whether the answer shows it, under
    all common names."""

    shapes: ClassVar[Shape] = {
        "messages": MESSAGE,
        "tools": TOOL,
        "tool_choice": CHOICE,
        "reasoning": REASONING,
    }
    reasoning: ReasoningFields | None = Field(
        None, description="`effort`, and `max_tokens` of reasoning at most"
    )
    reasoning_effort: Effort | None = None
    thinking: ThinkingSwitch | None = None
    think: bool | Literal["none", "low", "medium", "high", "max"] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = Field(
        None, description="false: reasoning is no part of the answer"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: Budget | None = Field(
        None, description="tokens of reasoning at most; -1 = no limit"
    )
    thinking_token_budget: Budget | None = Field(
        None, description="another name of thinking_budget (vLLM)"
    )
    thinking_budget_tokens: Budget | None = Field(
        None, description="another name of thinking_budget (llama.cpp)"
    )
    reasoning_budget_tokens: Budget | None = Field(
        None, description="another name of thinking_budget (llama.cpp)"
    )
    parse_special: ParseSpecial = None

    def thinking_tokens(self) -> int | None:
        """Return the reasoning budget from the first field that was sent. None means no limit."""
        return first_limit(
            self.reasoning.max_tokens if self.reasoning else None,
            self.thinking.budget_tokens if self.thinking else None,
            self.thinking_budget,
            self.thinking_token_budget,
            self.thinking_budget_tokens,
            self.reasoning_budget_tokens,
        )

    def effort(self) -> str | None:
        """Return the reasoning effort: "none" if any switch is off, else the level that was sent,
        else a default level if a switch is on."""
        variables = self.chat_template_kwargs or {}
        asked = self.reasoning or ReasoningFields.model_validate({})
        switches = [
            self.think,
            self.enable_thinking,
            asked.enabled,
            variables.get("enable_thinking"),
            variables.get("thinking"),
        ]
        thinking = self.thinking and self.thinking.type
        if thinking == "disabled" or False in switches:
            return "none"
        level = self.reasoning_effort or asked.effort
        if level:
            return level
        if isinstance(self.think, str):
            return self.think
        if thinking:
            return "high"
        return "medium" if self.think or self.enable_thinking else None

    def summarises(self) -> str | None:
        """Return the requested kind of reasoning summary, or None."""
        asked = self.reasoning or ReasoningFields.model_validate({})
        return asked.summary or asked.generate_summary

    def response_options(
        self, toolbox: Toolbox, choice: Any, grammar: Constraint | None, **more: Any
    ) -> ResponseOptions:
        """Return the options of the answer, with the tools that `choice` (OpenAI's `tool_choice`)
        allows. Raises RequestError."""
        tools, chosen = toolbox.chosen(choice)
        hides = self._hiding()
        summarised = ["reasoning.summary"] if self.summarises() else []
        return ResponseOptions(
            tools=tools,
            choice=chosen,
            grammar=grammar,
            effort=self.effort(),
            template_kwargs=self.chat_template_kwargs,
            parse_special=bool(self.parse_special),
            hides_reasoning=bool(hides),
            of_reasoning=(*hides, *summarised),
            **more,
        )

    def _hiding(self) -> list[str]:
        """Return the names of the fields that ask for an answer without reasoning."""
        hides = []
        if self.reasoning and self.reasoning.exclude:
            hides.append("reasoning.exclude")
        if self.include_reasoning is False:
            hides.append("include_reasoning")
        if self.thinking and self.thinking.display == "omitted":
            hides.append("thinking.display")
        return hides


class ReasonedFields(ThinkingFields, SamplingFields):
    """Body of a chat with the sampling fields at top level."""

    shapes: ClassVar[Shape] = {**ThinkingFields.shapes, "response_format": FORM}
