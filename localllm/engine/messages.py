"""What crosses the border of the engine: Request in, Events out. Plain values that survive a trip
through JSON.

Every submitted Request ends with exactly one Finish or one Failure, whatever dies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from localllm.grammars.trigger import GrammarTrigger

# The one fast text-to-JSON function of the standard library, without a keyword argument's overhead
# per call.
_quote = json.encoder.encode_basestring_ascii

FinishReason = Literal["stop", "length", "cancelled", "repetition"]
# The largest number of tokens a request may name.
MAX_TOKENS = 2**31 - 1
DRAFT_MODES = ("auto", "off", "ngram", "mtp")


@dataclass(frozen=True, slots=True)
class FieldRange:
    """The values that a request may give a parameter, and what they mean; `above`: `least` itself
    is not among them.
    `preset`: a model's preset may set it too; `reported`: the list of running requests shows it."""

    least: float
    most: float
    about: str = ""
    above: bool = False
    preset: bool = True
    reported: bool = True


_SHARE = FieldRange(0, 1)
_PENALTY = FieldRange(-2, 2)
_LOOKED_AT = "tokens looked at; -1 = the whole context"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. Filters apply in the order penalties, DRY, top_k, typical_p, top_p,
    min_p, XTC, temperature (llama.cpp's default order). This is the one list of them: the server's
    bodies, their checks, the OpenAPI document, presets and what crosses the pipe are made of these
    fields and their ranges (`SAMPLING_RANGES`)."""

    temperature: Annotated[float, FieldRange(0, 100, "0 is greedy")] = 0.8
    top_k: Annotated[int, FieldRange(-1, MAX_TOKENS, "0 or -1 switches it off")] = 40
    top_p: Annotated[float, _SHARE] = 0.95
    min_p: Annotated[float, _SHARE] = 0.05
    typical_p: Annotated[float, _SHARE] = 1.0
    repeat_penalty: Annotated[float, FieldRange(0, 10, above=True)] = 1.0
    repeat_last_n: Annotated[int, FieldRange(-1, MAX_TOKENS, _LOOKED_AT)] = 64
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    seed: Annotated[int | None, FieldRange(-(2**63), 2**64 - 1, "-1 draws one", reported=False)] = (
        None
    )
    logit_bias: Annotated[dict[int, float], FieldRange(-100, 100, preset=False, reported=False)] = (
        field(default_factory=dict)
    )
    dry_multiplier: Annotated[float, FieldRange(0, 100, "0 switches DRY off", preset=False)] = 0.0
    dry_base: Annotated[float, FieldRange(1, 100, preset=False, reported=False)] = 1.75
    dry_allowed_length: Annotated[int, FieldRange(0, MAX_TOKENS, preset=False, reported=False)] = 2
    dry_penalty_last_n: Annotated[
        int, FieldRange(-1, MAX_TOKENS, _LOOKED_AT, preset=False, reported=False)
    ] = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: Annotated[
        float, FieldRange(0, 1, "0 switches XTC off; of no effect when greedy", preset=False)
    ] = 0.0
    xtc_threshold: Annotated[
        float, FieldRange(0, 1, "above 0.5 switches XTC off", preset=False)
    ] = 0.1


# Every sampling parameter that is a number, or numbers, with its range, in the order of the
# dataclass.
SAMPLING_RANGES: Mapping[str, FieldRange] = {
    name: get_args(hint)[1]
    for name, hint in get_type_hints(Sampling, include_extras=True).items()
    if get_origin(hint) is Annotated
}


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """An answer ends as a loop when its last tokens are one pattern of so many tokens, `min_count`
    times in a row."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


@dataclass(frozen=True, slots=True)
class Generation:
    """How one answer is made, whatever its prompt: made once from a client's body, then carried
    whole. What changes on the way is `dataclasses.replace`d, so that nothing gets lost.

    `max_tokens` None = the remaining window.
    `logprobs` counts the alternatives reported per token (None = none reported at all); behind them
    come the tokens of `logprobs_of`, however unlikely.
    `cache_prompt` False neither uses nor fills the prefix cache.
    `prediction` is text the client expects in the answer, which drafting tries first. Before
    `min_tokens` neither the model's own end nor a token of `stop_token_ids` may come.
    `thinking_tokens`: the longest reasoning (None: no limit).
    `loops`: what counts as a loop and ends the answer (None: nothing).
    `priority`: above 0 it is served before others, below 0 after them, as far as that starves
    nobody (scheduler.arrival).
    `tenant` is who asks, by the name of a key: what there is is shared evenly between tenants
    (engine/scheduler.py), and `choices_of` a request of several choices that this is one of ("":
    none). Only requests of the same `salt` use each other's KV.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_of: tuple[int, ...] = ()
    time_limit_s: float | None = None
    cache_prompt: bool = True
    prediction: str = ""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    thinking_tokens: int | None = None
    loops: LoopLimits | None = None
    priority: int = 0
    tenant: str = ""
    choices_of: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """Reasoning ends after `tokens` tokens: `closing` and `after` are put there. `opening` begins
    it, and with `opened` the prompt has done so."""

    tokens: int
    opening: str
    closing: str
    after: str = ""
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a model marks its reasoning, and whether the prompt has `opened` it. `may_call`: a tool
    call that comes before any word of the reasoning ends it."""

    opening: str
    closing: str
    opened: bool = False
    may_call: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must match.

    `grammar` is that of the whole answer, as ("json_schema" | "lark" | "regex" | "gbnf", source).
    The prompt may end with `beginning`, the answer's beginning: the grammar goes on behind it, if it
    allows that. In an answer with `reasoning` that is open, the grammar begins behind it and behind
    `lead`, which is put there.
    `triggers`: texts in a free answer, each with the grammar of what follows it. Those in the
    `reasoning` do not count.
    """

    grammar: tuple[str, str] | None = None
    beginning: str = ""
    lead: str = ""
    triggers: dict[str, GrammarTrigger] = field(default_factory=dict)
    reasoning: Reasoning | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One `generation` behind a `prompt`, which is text (special tokens parsed) or token ids.

    `add_bos` puts the BOS token before a text, where the model wants one.
    `render_control` also writes control tokens into the text, for replies whose structure they
    mark.
    `draft`: auto, ngram or off.
    `thinking` is how the generation's limit on its reasoning is kept in this model's words.
    `images`: the files in base64, each by the mark that stands for it in a prompt of text.
    """

    id: str
    prompt: str | list[int]
    generation: Generation = field(default_factory=Generation)
    constraint: Constraint | None = None
    add_bos: bool = True
    render_control: bool = False
    draft: str = "auto"
    thinking: ThinkingLimit | None = None
    images: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt were not prefilled; `cache_miss`:
    why the rest was."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    cache_miss: str = ""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds by phase: waiting in the queue, prefilling, decoding; ttft_s runs from submit to the
    first token.
    `decode_steps`: sweeps over the weights that decoded for it after the first token."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    decode_steps: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """Accepted; `ahead` requests are served first."""

    kind: ClassVar[str] = "queued"
    id: str
    ahead: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt progress in tokens: `done` of `total`, of which `cached` came from the prefix
    cache."""

    kind: ClassVar[str] = "prefill"
    id: str
    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token's text, id and log-probability, with the `top` alternatives as (text, id,
    logprob). Bytes of a text that are no UTF-8 are surrogate escapes (PEP 383)."""

    text: str
    token: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """New text and the tokens behind it. `text` may be empty while a stop string or a split
    character is pending."""

    kind: ClassVar[str] = "text"
    id: str
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request that went well (also when its client cancelled it). `stop` is the
    matched stop string."""

    kind: ClassVar[str] = "finish"
    id: str
    reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a request that did not: `code` names a leaf of localllm.errors. `counts`: the
    tokens of a prompt that does not fit, and of the window."""

    kind: ClassVar[str] = "failure"
    id: str
    code: str
    message: str
    hint: str = ""
    counts: tuple[int, int] | None = None


Event: TypeAlias = Queued | Prefill | Text | Finish | Failure

_EVENTS: dict[str, type[Any]] = {cls.kind: cls for cls in (Queued, Prefill, Text, Finish, Failure)}


_hints = cache(get_type_hints)


def _from_json(kind: Any, value: Any) -> Any:
    """A plain JSON value as what its annotation says: dataclasses, tuples, and numbers that were
    keys."""
    kinds = get_args(kind)
    if hasattr(kind, "__dataclass_fields__") and value is not None:
        hints = _hints(kind)
        return kind(**{name: _from_json(hints[name], given) for name, given in value.items()})
    if get_origin(kind) is tuple:
        each = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return tuple(map(_from_json, each, value))
    if get_origin(kind) is dict:
        return {kinds[0](key): _from_json(kinds[1], given) for key, given in value.items()}
    # `X | None`, where nothing else is written so; `str | list[int]` is the same in JSON.
    if type(None) in kinds and value is not None:
        return _from_json(kinds[0], value)
    return value


def request_from_json(data: dict[str, Any]) -> Request:
    """The inverse of `asdict`, of what came through JSON."""
    return cast("Request", _from_json(Request, data))


def event_text(event: Event) -> str:
    """An Event and its `kind` as JSON text, in ASCII. Text without logprobs is written by hand:
    this runs once per token, between two steps of the model."""
    if type(event) is Text and not event.logprobs:
        tokens = ",".join([str(t) for t in event.tokens])
        return f'{{"kind":"text","id":{_quote(event.id)},"text":{_quote(event.text)},"tokens":[{tokens}]}}'
    return json.dumps({"kind": event.kind, **asdict(event)}, separators=(",", ":"))


def event_from_json(data: dict[str, Any]) -> Event:
    """The inverse of `event_text`, of what json.loads makes of it."""
    if data["kind"] == "text" and not data.get("logprobs"):
        return Text(data["id"], data["text"], tuple(data["tokens"]))
    fields = {name: value for name, value in data.items() if name != "kind"}
    return cast("Event", _from_json(_EVENTS[data["kind"]], fields))
