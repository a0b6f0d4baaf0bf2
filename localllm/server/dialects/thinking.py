"""Fields that control whether and how long a model reasons, and whether the answer shows it.
Supports the names used by all makers of models and servers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from localllm.conversation.repeated_calls import MIN_NOTED
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
    indifferent,
    shape_of,
)
from localllm.server.dialects.toolbox import Toolbox
from localllm.server.generation.prompt import ResponseOptions

# For bodies that contain a conversation.
ParseSpecial = Annotated[
    bool | None,
    Field(
        description="true: parse control tokens in messages and tools; default: treat them as text"
    ),
]
LoopGuard = Annotated[int, Field(ge=MIN_NOTED, le=64)]
_SUMMARIES = ("auto", "concise", "detailed")


class ReasoningFields(BodyPart):
    """`reasoning` of OpenAI's Responses API and of OpenRouter."""

    # Every kind of summary is the full reasoning.
    shapes: ClassVar[Shape] = dict.fromkeys(
        ("summary", "generate_summary"), indifferent(*_SUMMARIES)
    )
    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = Field(
        None, description="maximum tokens of reasoning; -1 = no limit"
    )
    exclude: bool | None = Field(None, description="true: omit the reasoning from the answer")
    summary: str | None = Field(
        None,
        description=(
            "auto, concise or detailed: return the reasoning as summary parts; it is "
            "complete, not shortened"
        ),
    )
    generate_summary: str | None = Field(None, description="the former name of summary")


class ThinkingSwitch(BodyPart):
    """`thinking` of Anthropic, DeepSeek and GLM."""

    shapes: ClassVar[Shape] = {"display": indifferent("summarized", "omitted")}
    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count | None = None
    display: str | None = Field(None, description="omitted: omit the reasoning from the answer")


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
        None, description="`effort`; `max_tokens`: maximum tokens of reasoning"
    )
    reasoning_effort: Effort | None = None
    thinking: ThinkingSwitch | None = None
    think: bool | Literal["none", "low", "medium", "high", "max"] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = Field(
        None, description="false: omit the reasoning from the answer"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: Budget | None = Field(
        None, description="maximum tokens of reasoning; -1 = no limit"
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
    loop_guard: LoopGuard | Annotated[bool, Field(strict=True)] | None = Field(
        None,
        description=(
            "after so many equal calls in a row with equal results (true: 3), "
            "the answer can't call tools"
        ),
    )

    def thinking_tokens(self) -> int | None:
        """Return the reasoning budget from the first field that was sent. None means no limit."""
        return first_limit(*self._budgets().values())

    def _budgets(self) -> dict[str, int | None]:
        return {
            "reasoning.max_tokens": self.reasoning.max_tokens if self.reasoning else None,
            "thinking.budget_tokens": self.thinking.budget_tokens if self.thinking else None,
            "thinking_budget": self.thinking_budget,
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget_tokens": self.thinking_budget_tokens,
            "reasoning_budget_tokens": self.reasoning_budget_tokens,
        }

    def budget_fields(self) -> list[str]:
        """Return the names of the fields that limit the reasoning."""
        return [name for name, sent in self._budgets().items() if sent is not None and sent >= 0]

    def constraint_field(self) -> str:
        """Return the name of the field that constrains the answer."""
        return "response_format"

    def effort_fields(self) -> list[str]:
        """Return the names of the fields that set the reasoning effort or switch it on or off. The
        template's variables are not among them."""
        asked = self.reasoning or ReasoningFields.model_validate({})
        sent = {
            "thinking.type": self.thinking and self.thinking.type,
            "think": self.think,
            "enable_thinking": self.enable_thinking,
            "reasoning.enabled": asked.enabled,
            "reasoning_effort": self.reasoning_effort,
            "reasoning.effort": asked.effort,
        }
        return [name for name, value in sent.items() if value is not None]

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
        sent = (asked.summary, asked.generate_summary)
        return next((kind for kind in sent if kind in _SUMMARIES), None)

    def response_options(
        self, toolbox: Toolbox, choice: Any, grammar: Constraint | None, **more: Any
    ) -> ResponseOptions:
        """Return the options of the answer, with the tools that `choice` (OpenAI's `tool_choice`)
        allows. Raises RequestError."""
        tools, chosen = toolbox.chosen(choice)
        hides = self._fields_hiding_reasoning()
        summarised = ["reasoning.summary"] if self.summarises() else []
        return ResponseOptions(
            tools=tools,
            choice=chosen,
            grammar=grammar,
            effort=self.effort(),
            template_kwargs=self.chat_template_kwargs,
            parse_special=bool(self.parse_special),
            loop_guard=self._guarded_calls(),
            hides_reasoning=bool(hides),
            reasoning_fields=(*hides, *summarised),
            effort_fields=tuple(self.effort_fields()),
            budget_fields=tuple(self.budget_fields()),
            grammar_field=self.constraint_field(),
            **more,
        )

    def _guarded_calls(self) -> int | None:
        """Return the number of equal calls that ends a loop, or None."""
        if self.loop_guard is True:
            return MIN_NOTED
        return self.loop_guard or None

    def _fields_hiding_reasoning(self) -> list[str]:
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

    shapes: ClassVar[Shape] = {
        **ThinkingFields.shapes,
        **SamplingFields.shapes,
        "response_format": FORM,
    }

    def constraint_field(self) -> str:
        return self.sent_constraint() or super().constraint_field()
