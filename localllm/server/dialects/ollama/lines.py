"""Ollama's dialect: its requests to Asks and Jobs, and replies as its JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from localllm.conversation.fim import fim_prompt
from localllm.conversation.messages import normalise
from localllm.conversation.tools.prompt import checked, choice_of
from localllm.engine.api import Engine
from localllm.engine.messages import Sampling, Timings, TokenLogprob
from localllm.errors import LocalLLMError, RequestError, UnsupportedError
from localllm.server.dialects.fields import StopText, _Body
from localllm.server.generation import prompting
from localllm.server.generation.conversing import Ask
from localllm.server.generation.folding import Fold
from localllm.server.generation.generate import Job, Outcome, Spent
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ServedModel

# The release of Ollama whose API this is; VS Code asks for at least 0.6.4.
VERSION = "0.12.6"
HINTS = frozenset({"keep_alive", "model", "name", "stream", "truncate"})
_REFUSED_OPTIONS = {"mirostat": (0, None), "tfs_z": (1, 1.0, None)}


class Options(BaseModel):
    """`options`: how tokens are chosen. Unknown ones are tolerated and named."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=10)
    repeat_last_n: int | None = Field(None, ge=-1, le=2**31 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    num_predict: int | None = Field(None, ge=-2, le=2**31 - 1)
    stop: StopText | Annotated[list[StopText], Field(max_length=32)] | None = None


class _OllamaBody(_Body):
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None

    def _options(self) -> Options:
        return self.options if self.options is not None else Options.model_validate({})

    def sampling(self, default: Sampling) -> Sampling:
        """The options over the model's defaults."""
        options = self._options()
        given = {
            k: v for k, v in options.model_dump(exclude={"num_predict", "stop"}, exclude_none=True).items()
            if k in Options.model_fields
        }  # fmt: skip
        if given.get("seed") == -1:
            del given["seed"]
        elif "seed" in given:
            given["seed"] &= 2**63 - 1
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if given.get("repeat_last_n") == -1:
            given["repeat_last_n"] = 2**31 - 1
        return replace(default, **given)

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        sent = self._options().stop
        return tuple(s for s in ([sent] if isinstance(sent, str) else sent or []) if s)

    def answer_tokens(self) -> int | None:
        """The longest answer asked for."""
        n = self._options().num_predict
        return None if n is None or n < 0 else n

    def effort(self) -> str | None:
        """`think` as an effort; unsaid is not the same as off."""
        if self.think is None:
            return None
        if isinstance(self.think, bool):
            return "medium" if self.think else "none"
        if self.think not in ("low", "medium", "high"):
            raise RequestError("think must be true, false, low, medium or high", param="think")
        return self.think

    def constraint(self) -> tuple[str, str] | None:
        """`format`: "json" or a schema."""
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return prompting.constraint({"type": "json_object"})
        if isinstance(self.format, dict):
            return ("json_schema", json.dumps(self.format))
        raise RequestError('format must be "json" or a JSON schema', param="format")

    def ignored(self) -> list[str]:
        """Options without effect: above all those about loading (num_ctx, num_gpu …), as no request reloads a model.
        Raises UnsupportedError for those that would change the answer."""
        extra = (self.options.model_extra if self.options else None) or {}
        for name, off in _REFUSED_OPTIONS.items():
            if name in extra and extra[name] not in off:
                raise UnsupportedError(f"options.{name} is not implemented", param=f"options.{name}")
        return [f"options.{k}" for k in sorted(extra) if k not in _REFUSED_OPTIONS]


class OllamaChat(_OllamaBody):
    """POST /api/chat."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)


class OllamaGenerate(_OllamaBody):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = Field(None, max_length=0, description="this model reads text only")
    template: Annotated[str, Field(max_length=0)] | None = Field(None, description="the model's own template is used")


def chat_ask(fields: OllamaChat, default: Sampling) -> Ask:
    """The Ask of a chat."""
    for i, message in enumerate(fields.messages):
        if message.get("images"):
            raise UnsupportedError(f"messages[{i}].images: this model reads text only", param="messages")
    tools = checked(fields.tools)
    return _ask(fields, default, fields.messages, replace_tools=tools)


def generate_ask(fields: OllamaGenerate, default: Sampling) -> Ask:
    """The Ask of a prompt that goes through the template."""
    messages = [{"role": "system", "content": fields.system}] if fields.system else []
    return _ask(fields, default, [*messages, {"role": "user", "content": fields.prompt}], replace_tools=[])


def _ask(fields: _OllamaBody, default: Sampling, messages: Any, *, replace_tools: list[dict[str, Any]]) -> Ask:
    return Ask(
        messages=normalise(messages),
        sampling=fields.sampling(default),
        tools=replace_tools,
        choice=choice_of(None, replace_tools),
        grammar=fields.constraint(),
        effort=fields.effort(),
        max_tokens=fields.answer_tokens(),
        stop=fields.stops(),
    )


async def raw_job(fields: OllamaGenerate, model: ServedModel, engine: Engine) -> Job:
    """The job of a raw prompt or one with a suffix."""
    prompt: str | list[int] = fields.prompt
    if fields.suffix:
        prompt = await fim_prompt(engine, fields.prompt, fields.suffix, answer_tokens=fields.answer_tokens())
    return Job(
        prompt=prompt,
        add_bos=prompting.wants_bos(engine.info, prompt) if isinstance(prompt, str) else False,
        max_tokens=fields.answer_tokens(),
        sampling=fields.sampling(model.sampling),
        stop=fields.stops(),
        grammar=fields.constraint(),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """How chat and generate differ: where the text, the thinking and the calls go."""

    chat: bool

    def body(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The part of a line that carries the answer."""
        if not self.chat:
            return {"response": text, **({"thinking": thinking} if thinking else {})}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class Lines:
    """The Writer of JSON lines. A call is one object here, so it waits until its arguments are complete."""

    def __init__(self, outbox: Outbox, model: str, shape: Shape) -> None:
        self._outbox, self._model, self._shape = outbox, model, shape
        self._call: tuple[str, list[str]] | None = None
        self._outcome: Outcome | None = None

    def start(self) -> None:
        """Nothing to say yet."""

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """A piece of the answer."""
        self._flush()
        if text:
            self._line(self._shape.body(text))

    def reasoning(self, choice: int, text: str) -> None:
        """A piece of the thinking."""
        self._line(self._shape.body("", thinking=text))

    def call_start(self, choice: int, index: int, name: str) -> None:
        """A call begins."""
        self._flush()
        self._call = (name, [])

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """Keep its arguments."""
        assert self._call is not None
        self._call[1].append(text)

    def finish(self, choice: int, outcome: Outcome) -> None:
        """Send the last call."""
        self._flush()
        self._outcome = outcome

    def end(self, usage: Spent, timings: Timings) -> None:
        """The last line."""
        assert self._outcome is not None
        self._line({**self._shape.body(""), **done(self._outcome, usage, timings)})

    def _flush(self) -> None:
        if self._call is not None:
            name, pieces = self._call
            self._call = None
            self._line(self._shape.body("", calls=[call(name, "".join(pieces))]))

    def _line(self, body: Mapping[str, Any]) -> None:
        said = {"model": self._model, "created_at": now(), **body}
        said.setdefault("done", False)
        self._outbox.write(json.dumps(said, ensure_ascii=False).encode() + b"\n")


def whole(fold: Fold, model: str, shape: Shape) -> dict[str, Any]:
    """The reply in one object."""
    choice = fold.choices[0]
    assert choice.outcome is not None
    calls = [call(c.name, c.arguments) for c in choice.calls]
    body = shape.body(choice.text, choice.reasoning, calls)
    return {"model": model, "created_at": now(), **body, **done(choice.outcome, fold.usage, fold.timings)}


def call(name: str, arguments: str) -> dict[str, Any]:
    """Ollama's tool call: arguments are an object."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        parsed = {"_unparsed": arguments}
    return {"function": {"name": name, "arguments": parsed}}


def done(outcome: Outcome, usage: Spent, timings: Timings) -> dict[str, Any]:
    """The fields of the last line; durations in nanoseconds."""
    total = timings.queued_s + timings.prefill_s + timings.decode_s
    return {
        "done": True,
        "done_reason": "length" if outcome.reason == "length" else "stop",
        "total_duration": int(total * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(timings.prefill_s * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(timings.decode_s * 1e9),
    }


def frame_error(error: LocalLLMError) -> bytes:
    """An error as the last line."""
    return json.dumps({"error": error.message}).encode() + b"\n"


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def model_details(model: ServedModel) -> dict[str, Any]:
    """`details` of a model list."""
    info = model.info
    return {
        "parent_model": "",
        "format": str(model.details.get("format", "gguf")),
        "family": info.architecture if info else str(model.details.get("architecture", "")),
        "families": [info.architecture] if info else [],
        "parameter_size": f"{info.n_params / 1e9:.1f}B" if info else "",
        "quantization_level": str(model.details.get("quant", "")),
    }


def tag(model: ServedModel) -> dict[str, Any]:
    """One entry of /api/tags."""
    info = model.info
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.fromtimestamp(model.created_s, UTC).isoformat().replace("+00:00", "Z"),
        "size": info.weights_bytes if info else int(model.details.get("bytes", 0)),
        "digest": info.fingerprint if info else "",
        "details": model_details(model),
    }


def show(model: ServedModel, template: str) -> dict[str, Any]:
    """/api/show. `template` mentions `.Suffix` only where the model can fill in (Continue looks for it)."""
    info = model.info
    architecture = info.architecture if info else "unknown"
    capabilities = model.capabilities
    if "insert" in capabilities:
        template += "{{/* .Suffix */}}"
    return {
        "modelfile": "",
        "parameters": f"num_ctx {model.served_n_ctx}" if model.served_n_ctx else "",
        "template": template,
        "details": model_details(model),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": model.name,
            "general.parameter_count": info.n_params if info else None,
            f"{architecture}.context_length": model.served_n_ctx,
        },
        "capabilities": capabilities,
        "modified_at": tag(model)["modified_at"],
    }
