"""Bodies of Ollama's API, and their translation to chat requests, generation jobs and embedding
requests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from localllm.engine.messages import MAX_TOKENS, Generation, Sampling
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.constraints import Constraint, of_object, of_schema
from localllm.server.dialects.fields import (
    Alternatives,
    Budget,
    GenerationFields,
    Limit,
    RequestBody,
    SentTools,
    first_limit,
)
from localllm.server.dialects.known import (
    REFUSED,
    Refused,
    Shape,
    Unused,
)
from localllm.server.dialects.thinking import ThinkingFields
from localllm.server.dialects.toolbox import NO_TOOLS, Toolbox
from localllm.server.dialects.vectors import MAX_INPUTS
from localllm.server.generation.chat import ChatRequest
from localllm.server.models.router import ServedModel

# Go durations (1h30m, 300ms, -1m), or a number of seconds.
_DURATION = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|[+-]?\d+(?:\.\d*)?", re.ASCII)
_PIECE = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h|$)")
_FOR_EVER_S = 1e9
_UNIT_S = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "": 1.0,
    "m": 60.0,
    "h": 3600.0,
}


def keep_alive_s(sent: str | float | None) -> float | None:
    """Return `keep_alive` in seconds: infinity if it is negative, None if it is absent. Raises
    RequestError."""
    if sent is None:
        return None
    if isinstance(sent, str):
        if _DURATION.fullmatch(sent) is None:
            raise RequestError(
                "keep_alive must be a number of seconds or a duration such as 5m",
                param="keep_alive",
            )
        length_s = sum(_pieces_s(sent))
        sent = -length_s if sent.startswith("-") else length_s
    if sent < 0 or sent > _FOR_EVER_S:
        return math.inf
    return float(sent)


def _pieces_s(duration: str) -> Iterator[float]:
    """Yield the parts of a duration in seconds: 3600 and 1800 for 1h30m."""
    for number, unit in _PIECE.findall(duration):
        yield float(number) * _UNIT_S[unit]


class Options(GenerationFields):
    """`options`. Options about loading have no effect, because no request reloads a model."""

    model_config = ConfigDict(allow_inf_nan=False)
    shapes: ClassVar[Shape] = {name: REFUSED[name] for name in ("mirostat", "tfs_z")}
    num_predict: Limit | None = None
    thinking_budget: Budget | None = Field(
        None, description="maximum tokens of reasoning; -1 = no limit"
    )


class OllamaBody(ThinkingFields):
    """The fields that chat and generate share."""

    # An answer ends when the context is full, because there is no context shift.
    shapes: ClassVar[Shape] = {**ThinkingFields.shapes, "name": None, "shift": Unused()}
    options: Options | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    keep_alive: str | float | None = Field(
        None,
        description="how long the model stays loaded: 5m, or seconds; -1 = forever, 0 = unload now",
    )
    truncate: bool | None = Field(
        None, description="omit the oldest messages if the chat exceeds the context"
    )
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    def generation(self, default: Sampling) -> Generation:
        options = self.options or Options.model_validate({})
        alternatives = None
        if self.logprobs:
            alternatives = self.top_logprobs or 0
        return options.generation(
            default,
            first_limit(options.num_predict),
            logprobs=alternatives,
            thinking_tokens=first_limit(options.thinking_budget, self.thinking_tokens()),
        )

    def constraint(self) -> Constraint | None:
        """Return the constraint from `format`, which is "json" or a schema."""
        if self.format == "json":
            return of_object(True)
        return of_schema(self.format) if self.format != "" else None

    def budget_fields(self) -> list[str]:
        if self.options is not None and self.options.thinking_budget is not None:
            return ["options.thinking_budget"]
        return super().budget_fields()

    def constraint_field(self) -> str:
        return "format"

    def ignored(self) -> list[str]:
        """Return the names of fields that have no effect in combination with the other fields."""
        if self.top_logprobs and not self.logprobs:
            return ["top_logprobs"]
        return []


class OllamaChat(OllamaBody):
    """POST /api/chat."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: SentTools | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="as in /v1/chat/completions; default: auto"
    )


class OllamaGenerate(OllamaBody):
    """POST /api/generate."""

    shapes: ClassVar[Shape] = {
        **OllamaBody.shapes,
        "template": Refused("the server always uses the model's own template", (None, "")),
    }
    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = Field(
        None, max_length=64, description="in base64; only for prompts that use the chat template"
    )

    @property
    def untemplated(self) -> bool:
        """Whether the prompt bypasses the chat template."""
        return bool(self.raw or self.suffix)

    def ignored(self) -> list[str]:
        """Return the names of fields without effect. If the prompt is not templated, they include
        fields that need a conversation. Raises UnsupportedError."""
        if self.images and self.untemplated:
            raise UnsupportedError(
                "images need the chat template: send them without raw and suffix", param="images"
            )
        ignored = super().ignored()
        if self.untemplated and self.truncate:
            ignored.append("truncate")
        if self.untemplated:
            ignored += self.effort_fields()
        return ignored


class OllamaManaged(RequestBody):
    """POST /api/show and DELETE /api/delete."""

    name: str | None = Field(None, max_length=512, description="the former name of `model`")

    def wanted(self) -> str:
        """Return the model's name. Raises RequestError."""
        ref = (self.model or self.name or "").strip()
        if not ref:
            raise RequestError("model is required", param="model")
        return ref


class OllamaPull(OllamaManaged):
    """POST /api/pull."""

    shapes: ClassVar[Shape] = {"insecure": Refused("downloads use only HTTPS", (None, False))}


def chat_request(
    fields: OllamaBody,
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    toolbox: Toolbox = NO_TOOLS,
    chosen: Any = None,
) -> ChatRequest:
    """Return the chat request for `messages`, with the tools that `chosen` allows."""
    options = fields.response_options(toolbox, chosen, fields.constraint())
    generation = fields.generation(model.sampling_for(options.effort))
    return ChatRequest(messages, generation, options, compaction=bool(fields.truncate))


class OllamaEmbed(RequestBody):
    """POST /api/embed."""

    shapes: ClassVar[Shape] = {"options": None}  # load parameters; embeddings need no sampling
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)]
    truncate: bool | None = Field(
        None, description="true (default): truncate inputs that are too long; false: reject them"
    )
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)
    keep_alive: str | float | None = None


class OllamaEmbeddings(RequestBody):
    """POST /api/embeddings, the older form of /api/embed."""

    shapes: ClassVar[Shape] = dict.fromkeys(("options", "truncate"))
    prompt: str
    keep_alive: str | float | None = None
