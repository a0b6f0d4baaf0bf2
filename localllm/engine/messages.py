"""Messages into and out of the engine: a Request goes in, Events come out. All are plain values
that can be sent as JSON.

Every submitted Request ends with exactly one Finish or Failure, even if the worker dies.
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

# The only fast text-to-JSON function of the standard library. Calling it directly avoids the
# overhead of a keyword argument.
_quote = json.encoder.encode_basestring_ascii

FinishReason = Literal["stop", "length", "cancelled", "repetition"]
# The largest token count that a request may give.
MAX_TOKENS = 2**31 - 1
# The most LoRA adapters that a request may name.
MAX_ADAPTERS = 64
DRAFT_MODES = ("auto", "off", "ngram", "mtp")


@dataclass(frozen=True, slots=True)
class FieldRange:
    """The range of values for a request parameter, and a note on their meaning.

    - `above`: `least` itself is not allowed.
    - `preset`: a model's preset may set the parameter too.
    - `reported`: the list of running requests shows it.
    """

    least: float
    most: float
    about: str = ""
    above: bool = False
    preset: bool = True
    reported: bool = True


_SHARE = FieldRange(0, 1)
_PENALTY = FieldRange(-2, 2)
_WINDOW_HELP = "number of latest tokens to consider; -1 = all tokens of the context"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters.

    Filters apply in the order penalties, DRY, top_k, typical_p, top_p, min_p, XTC, temperature
    (llama.cpp's default order). This class is the only list of the parameters. The server's request
    bodies, their checks, the OpenAPI document, presets and the messages to the worker are made from
    these fields and their ranges (`SAMPLING_RANGES`).
    """

    temperature: Annotated[float, FieldRange(0, 100, "0 is greedy")] = 0.8
    top_k: Annotated[int, FieldRange(-1, MAX_TOKENS, "0 or -1 turns it off")] = 40
    top_p: Annotated[float, _SHARE] = 0.95
    min_p: Annotated[float, _SHARE] = 0.05
    typical_p: Annotated[float, _SHARE] = 1.0
    repeat_penalty: Annotated[float, FieldRange(0, 10, above=True)] = 1.0
    repeat_last_n: Annotated[int, FieldRange(-1, MAX_TOKENS, _WINDOW_HELP)] = 64
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    seed: Annotated[
        int | None, FieldRange(-(2**63), 2**64 - 1, "-1: a random seed", reported=False)
    ] = None
    logit_bias: Annotated[dict[int, float], FieldRange(-100, 100, preset=False, reported=False)] = (
        field(default_factory=dict)
    )
    dry_multiplier: Annotated[float, FieldRange(0, 100, "0 turns DRY off", preset=False)] = 0.0
    dry_base: Annotated[float, FieldRange(1, 100, preset=False, reported=False)] = 1.75
    dry_allowed_length: Annotated[int, FieldRange(0, MAX_TOKENS, preset=False, reported=False)] = 2
    dry_penalty_last_n: Annotated[
        int, FieldRange(-1, MAX_TOKENS, _WINDOW_HELP, preset=False, reported=False)
    ] = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: Annotated[
        float, FieldRange(0, 1, "0 turns XTC off; no effect at temperature 0", preset=False)
    ] = 0.0
    xtc_threshold: Annotated[
        float, FieldRange(0, 1, "a value above 0.5 turns XTC off", preset=False)
    ] = 0.1


# The range of each sampling parameter that is a number or has numbers as values, in the order of
# the dataclass.
SAMPLING_RANGES: Mapping[str, FieldRange] = {
    name: get_args(hint)[1]
    for name, hint in get_type_hints(Sampling, include_extras=True).items()
    if get_origin(hint) is Annotated
}


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Limits of loop detection. An answer ends as a loop when its last tokens repeat one pattern of
    this size `min_count` times in a row."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


@dataclass(frozen=True, slots=True)
class Generation:
    """How one answer is generated, whatever its prompt is. It is made once from a client's body and
    then passed on as a unit. Changes on the way use `dataclasses.replace`, so that no field is
    lost.

    - `max_tokens`: None for the remaining context.
    - `logprobs`: number of alternatives reported per token (None: no log-probabilities).
    - `logprobs_of`: tokens reported after these alternatives, however unlikely they are.
    - `cache_prompt`: False neither uses nor fills the prefix cache.
    - `prediction`: text that the client expects in the answer; drafting tries it first.
    - `min_tokens`: before this many tokens, neither the model's end token nor one of
      `stop_token_ids` may be generated.
    - `thinking_tokens`: the longest reasoning (None: no limit).
    - `loops`: limits of loop detection, which ends the answer (None: off).
    - `priority`: requests above 0 are served before others, and those below 0 after them. All are
      served in the end (scheduler.arrival).
    - `tenant`: name of the client's key. The engine is shared evenly between tenants
      (engine/scheduler.py).
    - `choices_of`: the request with several choices that this request is a part of ("": not part of
      one).
    - `salt`: only requests with the same salt use each other's KV.
    - `adapters`: the LoRA adapters to apply, as (number, scale) in the order in which the model's
      adapters were loaded (None: with the scales with which they were loaded).
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
    adapters: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """Limit on the reasoning. After `tokens` tokens, `closing` and `after` are inserted. `opening`
    starts the reasoning; `opened`: the prompt already contains it."""

    tokens: int
    opening: str
    closing: str
    after: str = ""
    opened: bool = False


@dataclass(frozen=True, slots=True)
class HiddenSpan:
    """A part of an answer that its reader does not see: reasoning, or structure of the format.

    - `opening` and `closing`: its markers. Without `closing` it is only the opening marker.
    - `first`: the opening marker counts only at the beginning of the answer.
    - `opened`: the prompt already contains the opening marker.
    - `interruptible`: the opening marker of any other span ends it too.
    """

    opening: str
    closing: str = ""
    first: bool = False
    opened: bool = False
    interruptible: bool = False


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around a model's reasoning.

    `opened`: the prompt has already opened it. `may_call`: a tool call before the first word of the
    reasoning ends it.
    """

    opening: str
    closing: str
    opened: bool = False
    may_call: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """Limits the text of an answer.

    - `grammar`: grammar of the whole answer, as ("json_schema" | "lark" | "regex" | "gbnf",
      source).
    - `beginning`: the start of the answer that the prompt may end with. The grammar continues after
      it, if it allows that text.
    - `lead`: text inserted after open `reasoning`; the grammar starts after it.
    - `triggers`: texts in a free answer, each with the grammar of the text that follows. Triggers
      within the `reasoning` do not count.
    """

    grammar: tuple[str, str] | None = None
    beginning: str = ""
    lead: str = ""
    triggers: dict[str, GrammarTrigger] = field(default_factory=dict)
    reasoning: Reasoning | None = None


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The beginning of a prompt that other prompts have too: its system prompt and tools.

    - `servers`: names (host:port) of servers of the same pool that were given it, in the order in
      which they are asked for its KV.
    - `n_chars`: its length in a text prompt.
    - `n_tokens`: its length after the prompt is tokenised (0 before).
    """

    servers: tuple[str, ...]
    n_chars: int = 0
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A `prompt` (text with special tokens parsed, or token ids) and the `generation` of its
    answer.

    - `add_bos`: put the BOS token before a text prompt, if the model needs one.
    - `render_control`: also write control tokens into the text, for replies that use them as
      structure.
    - `draft`: auto, ngram or off.
    - `thinking`: the generation's limit on its reasoning, with this model's markers.
    - `media`: image files in base64 or samples (engine/media.py), by their marks in a text prompt.
    - `hidden`: parts of the answer in which stop texts do not count.
    - `sends_from`: compute the prompt except its last token, send its KV from this token on, and
      generate nothing (engine/transfer/).
    - `shared`: the beginning of the prompt that other servers may have read.
    """

    id: str
    prompt: str | list[int]
    generation: Generation = field(default_factory=Generation)
    constraint: Constraint | None = None
    add_bos: bool = True
    render_control: bool = False
    draft: str = "auto"
    thinking: ThinkingLimit | None = None
    media: dict[str, str] = field(default_factory=dict)
    hidden: tuple[HiddenSpan, ...] = ()
    sends_from: int | None = None
    shared: SharedPrefix | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt were not prefilled; `cache_miss`
    is the reason why the rest was. `fetched_tokens` of the prompt were prefilled by another server,
    `fetched_from`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    cache_miss: str = ""
    fetched_tokens: int = 0
    fetched_from: str = ""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds per phase: waiting in the queue, prefilling, decoding. `ttft_s` is the time from
    submission to the first token.

    `decode_steps`: passes over the weights that decoded for the request after its first token.
    """

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    decode_steps: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """The request was accepted; `ahead` requests are served first."""

    kind: ClassVar[str] = "queued"
    id: str
    ahead: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Progress of the prompt in tokens: `done` of `total`, of which `cached` came from the prefix
    cache."""

    kind: ClassVar[str] = "prefill"
    id: str
    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Text, id and log-probability of one generated token, with the `top` alternatives as (text,
    id, logprob). Bytes that are not valid UTF-8 become surrogate escapes (PEP 383)."""

    text: str
    token: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """New text with its tokens. `text` may be empty while a stop string or a split character is
    pending."""

    kind: ClassVar[str] = "text"
    id: str
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The successful end of a request. Also used if its client cancelled it. `stop` is the matched
    stop string."""

    kind: ClassVar[str] = "finish"
    id: str
    reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The failed end of a request. `code` names a leaf of localllm.errors. `counts`: tokens of a
    prompt that does not fit, and of the context."""

    kind: ClassVar[str] = "failure"
    id: str
    code: str
    message: str
    hint: str = ""
    counts: tuple[int, int] | None = None


def prompt_too_long(request_id: str, n_tokens: int, n_ctx: int) -> Failure:
    """The end of a request whose prompt does not fit into the context."""
    message = f"the prompt has {n_tokens} tokens and the served context is {n_ctx}"
    return Failure(request_id, "context_length_exceeded", message, counts=(n_tokens, n_ctx))


Event: TypeAlias = Queued | Prefill | Text | Finish | Failure

_EVENTS: dict[str, type[Any]] = {cls.kind: cls for cls in (Queued, Prefill, Text, Finish, Failure)}


_hints = cache(get_type_hints)


def _from_json(kind: Any, value: Any) -> Any:
    """Convert a JSON value to its annotated type: dataclasses, tuples, and keys that are numbers."""
    kinds = get_args(kind)
    if hasattr(kind, "__dataclass_fields__") and value is not None:
        hints = _hints(kind)
        return kind(**{name: _from_json(hints[name], entry) for name, entry in value.items()})
    if get_origin(kind) is tuple:
        each = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return tuple(map(_from_json, each, value))
    if get_origin(kind) is dict:
        return {kinds[0](key): _from_json(kinds[1], entry) for key, entry in value.items()}
    # This is `X | None`. The only other union, `str | list[int]`, is the same in JSON.
    if type(None) in kinds and value is not None:
        return _from_json(kinds[0], value)
    return value


def request_from_json(data: dict[str, Any]) -> Request:
    """A Request from the JSON of its `asdict`."""
    return cast("Request", _from_json(Request, data))


def event_text(event: Event) -> str:
    """An Event and its `kind` as ASCII JSON text. Text without logprobs is formatted by hand,
    because this runs once per token between two steps."""
    if type(event) is Text and not event.logprobs:
        tokens = ",".join([str(t) for t in event.tokens])
        return f'{{"kind":"text","id":{_quote(event.id)},"text":{_quote(event.text)},"tokens":[{tokens}]}}'
    return json.dumps({"kind": event.kind, **asdict(event)}, separators=(",", ":"))


def event_from_json(data: dict[str, Any]) -> Event:
    """An Event from parsed JSON, the inverse of `event_text`."""
    if data["kind"] == "text" and not data.get("logprobs"):
        return Text(data["id"], data["text"], tuple(data["tokens"]))
    fields = {name: value for name, value in data.items() if name != "kind"}
    return cast("Event", _from_json(_EVENTS[data["kind"]], fields))
