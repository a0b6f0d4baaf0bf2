"""Fields of request bodies that have an effect, with their ranges. The sampling fields are
generated from `engine.messages.Sampling`, which declares the range of each. `known.py` handles all
other fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    get_args,
    get_type_hints,
)

from pydantic import AfterValidator, ConfigDict, Field, create_model

from localllm.engine.messages import MAX_ADAPTERS, MAX_TOKENS, Generation, LoopLimits, Sampling
from localllm.errors import RequestError
from localllm.server.dialects.constraints import (
    ChoiceTexts,
    Constraint,
    GrammarSource,
    RegexSource,
    SchemaSource,
    StructuredFields,
    of_choice,
    of_grammar,
    of_regex,
    of_response_format,
    of_schema,
    only_one,
)
from localllm.server.dialects.known import BodyPart, Shape, indifferent

Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Truncation = Annotated[
    Literal["auto", "disabled"] | None,
    Field(
        description=(
            "what to do if the conversation exceeds the context: disabled = reject it, auto "
            "= omit its oldest turns"
        )
    ),
]
Budget = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
Limit = Annotated[int, Field(ge=-2, le=MAX_TOKENS)]


def _lowest_bias(_: bool) -> float:
    return -100.0


# llama.cpp also accepts `false` for -100.
Bias = (
    Annotated[float, Field(ge=-100, le=100, strict=True)]
    | Annotated[Literal[False], AfterValidator(_lowest_bias)]
)
MAX_PROMPTS = 16
Choices = Annotated[int, Field(ge=1, le=16)]
Alternatives = Annotated[int, Field(ge=0, le=20)]
SentTools = Annotated[list[dict[str, Any]], Field(max_length=512)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
StopText = Annotated[str, Field(max_length=1024)]

# Scheduling priority by OpenAI's `service_tier`. Any other value has priority 0.
PRIORITIES: Mapping[str, int] = {"priority": 1, "flex": -1, "batch": -1}
_OTHER_TIERS = ("auto", "default", "scale", "standard_only")
# Fields that constrain the answer, apart from `response_format`.
_CONSTRAINTS = (
    "grammar", "json_schema", "regex", "ebnf", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar",
)  # fmt: skip


class RequestBody(BodyPart):
    """Fields of every request body."""

    model_config = ConfigDict(allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(
        None,
        max_length=512,
        description="the name or alias of a served model; default: the first one",
    )
    stream: bool | None = Field(None, description="send the answer as server-sent events")


class LoopFields(BodyPart):
    """`repetition_detection`: ends an answer that repeats one pattern."""

    max_pattern_size: int = Field(0, ge=0, le=4096, description="tokens; 0 turns it off")
    min_pattern_size: int = Field(0, ge=0, le=4096, description="0 means 1")
    min_count: int = Field(2, ge=2, le=MAX_TOKENS, description="times in a row")

    def limits(self) -> LoopLimits | None:
        """Return the limits, or None if the detection is off. Raises RequestError."""
        if not self.max_pattern_size:
            return None
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                "min_pattern_size is greater than max_pattern_size", param="repetition_detection"
            )
        return LoopLimits(self.max_pattern_size, self.min_pattern_size or 1, self.min_count)


class LoraFields(BodyPart):
    """An entry of `lora`: a LoRA adapter by its number, and the scale of its effect."""

    id: int = Field(ge=0, lt=MAX_ADAPTERS, description="its number in GET /lora-adapters")
    scale: float = Field(ge=-1000, le=1000, description="0: it is not applied")


def _body_field(declared: Any) -> tuple[Any, Any]:
    """Return a numeric parameter of `Sampling` as an optional pydantic field."""
    number, limits = get_args(declared)
    lower_bound = "gt" if limits.above else "ge"
    bounds = {lower_bound: limits.least, "le": limits.most}
    return number | None, Field(None, **bounds, description=limits.about or None)


_DECLARED = get_type_hints(Sampling, include_extras=True)
# Parameters with a special JSON type. All others are numbers with the name and range that
# `Sampling` declares.
_OWN_JSON_FORM = ("logit_bias", "dry_sequence_breakers")
if TYPE_CHECKING:
    _SamplingNumbers = BodyPart
else:
    _NUMBERS = {
        name: _body_field(kind) for name, kind in _DECLARED.items() if name not in _OWN_JSON_FORM
    }
    _SamplingNumbers = create_model("_SamplingNumbers", __base__=BodyPart, **_NUMBERS)


def _for_engine(name: str, value: Any) -> Any:
    """Return the value of a sampling parameter in the engine's format."""
    if name == "top_k":
        return max(0, value)
    if name == "repeat_last_n" and value == -1:
        return MAX_TOKENS
    if name == "seed" and value == -1:
        return None  # the engine draws a random seed
    if name == "seed":
        return value & (2**63 - 1)
    if name == "dry_sequence_breakers":
        return tuple(text for text in value if text)
    if name == "logit_bias":
        return dict(value)
    return value


class GenerationFields(_SamplingNumbers):
    """Fields of all dialects that generate text: sampling and stop conditions. None means the
    model's default."""

    repetition_penalty: float | None = Field(
        None, gt=0, le=10, description="another name of repeat_penalty"
    )
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(max_length=40)]], Field(max_length=64)] | None
    ) = None
    stop: StopText | Annotated[list[StopText], Field(max_length=32)] | None = None
    min_tokens: Count | None = Field(
        None,
        description=(
            "minimum number of tokens: before it, the answer can't end by itself or by a stop token"
        ),
    )
    stop_token_ids: Annotated[list[Count], Field(max_length=1024)] | None = None
    repetition_detection: LoopFields | None = Field(
        None, description='end an answer that repeats a pattern, with finish_reason "repetition"'
    )

    def sent_sampling(self) -> dict[str, Any]:
        """Return the parameters of `Sampling` that the client sent."""
        sent = {name: getattr(self, name, None) for name in _DECLARED}
        if sent["repeat_penalty"] is None:
            sent["repeat_penalty"] = self.repetition_penalty
        return {name: _for_engine(name, value) for name, value in sent.items() if value is not None}

    def generation(self, default: Sampling, longest: int | None = None, **more: Any) -> Generation:
        """Return the generation settings: these fields, with the model's defaults for fields that
        were not sent.

        The answer has at most `longest` tokens (None: the rest of the context). `more` are
        additional fields of `Generation`. Raises RequestError."""
        if self.min_tokens and longest is not None and self.min_tokens > longest:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but the answer may have at most {longest}",
                param="min_tokens",
            )
        loops = self.repetition_detection
        return Generation(
            sampling=replace(default, **self.sent_sampling()),
            max_tokens=longest,
            stop=stop_texts(self.stop),
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            loops=loops.limits() if loops else None,
            **more,
        )


class SamplingFields(RequestBody, GenerationFields):
    """A body for generation with the fields of OpenAI, llama.cpp and vLLM."""

    shapes: ClassVar[Shape] = {"service_tier": indifferent(*PRIORITIES, *_OTHER_TIERS)}
    logit_bias: (
        Annotated[dict[TokenId, Bias], Field(max_length=4096)]
        | Annotated[list[tuple[TokenId, Bias]], Field(max_length=4096)]
        | None
    ) = Field(
        None,
        description="biases by token id; also [[id, bias], …], and false for -100, as in llama.cpp",
    )
    ignore_eos: bool | None = None
    cache_prompt: bool | None = Field(
        None, description="false: neither read nor fill the prefix cache"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="only requests with the same salt share cached prefixes (vLLM)",
    )
    lora: Annotated[list[LoraFields], Field(max_length=MAX_ADAPTERS)] | None = Field(
        None,
        description=(
            "LoRA adapters of this request, as in llama.cpp; those that are not listed have scale 0. "
            "Default, also for []: those of the model name"
        ),
    )
    n: Choices | None = None
    service_tier: str | None = Field(
        None,
        max_length=64,
        description='"priority" is served before other requests, "flex" and "batch" after them',
    )
    t_max_predict_ms: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="time limit of the answer; 0 = none"
    )
    grammar: GrammarSource | None = Field(
        None, description="a GBNF grammar that the answer must match"
    )
    json_schema: SchemaSource | None = Field(
        None, description="a JSON schema that the answer must match"
    )
    regex: RegexSource | None = Field(
        None, description="a regular expression that the answer must match (SGLang)"
    )
    ebnf: GrammarSource | None = Field(None, description="another name of grammar (SGLang)")
    structured_outputs: StructuredFields | None = Field(
        None, description="a constraint in vLLM's format"
    )
    guided_json: SchemaSource | None = Field(None, description="another name of json_schema (vLLM)")
    guided_regex: RegexSource | None = Field(None, description="another name of regex (vLLM)")
    guided_choice: ChoiceTexts | None = Field(
        None, description="a list of texts; the answer must be one of them (vLLM)"
    )
    guided_grammar: GrammarSource | None = Field(None, description="another name of grammar (vLLM)")

    def generation(self, default: Sampling, longest: int | None = None, **more: Any) -> Generation:
        time_limit_s = None
        if self.t_max_predict_ms:
            time_limit_s = self.t_max_predict_ms / 1000
        adapters = None
        if self.lora:
            adapters = tuple((entry.id, entry.scale) for entry in self.lora)
        return super().generation(
            default,
            longest,
            ignore_eos=bool(self.ignore_eos),
            time_limit_s=time_limit_s,
            cache_prompt=self.cache_prompt is not False,
            salt=self.cache_salt or "",
            priority=PRIORITIES.get(self.service_tier or "", 0),
            adapters=adapters,
            **more,
        )

    def sent_constraint(self) -> str | None:
        """Return the name of the field that constrains the answer, apart from `response_format`."""
        return next((name for name in _CONSTRAINTS if getattr(self, name) is not None), None)

    def constraint(self, response_format: Any = None) -> Constraint | None:
        """Return the constraint on the answer's form, from these fields or OpenAI's
        `response_format`. Raises RequestError if there are several."""
        structured = self.structured_outputs
        return only_one(
            response_format=of_response_format(response_format),
            grammar=of_grammar(self.grammar),
            json_schema=of_schema(self.json_schema),
            regex=of_regex(self.regex),
            ebnf=of_grammar(self.ebnf),
            structured_outputs=structured.constraint() if structured else None,
            guided_json=of_schema(self.guided_json, "guided_json"),
            guided_regex=of_regex(self.guided_regex),
            guided_choice=of_choice(self.guided_choice, "guided_choice"),
            guided_grammar=of_grammar(self.guided_grammar),
        )


def first_limit(*sent: int | None) -> int | None:
    """Return the first limit that was sent. None means no limit, and so does a negative limit."""
    for limit in sent:
        if limit is not None:
            return limit if limit >= 0 else None
    return None


def each(sent: Any) -> list[Any]:
    """Return the inputs as a list. `sent` is a text, the token ids of a text, or a list of
    either."""
    if isinstance(sent, str) or isinstance(sent[0], int):
        return [sent]
    return list(sent)


def stop_texts(sent: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings without empty ones."""
    if isinstance(sent, str):
        sent = [sent]
    return tuple(text for text in sent or () if text)
