"""POST /api/chat and /api/generate: what a client may send, and what it asks for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from localllm.conversation.fim import fim_prompt
from localllm.conversation.messages import normalise
from localllm.conversation.tools.prompt import checked, choice_of
from localllm.engine.api import EngineClient
from localllm.engine.messages import Generation, Sampling
from localllm.errors import RequestError, UnsupportedError
from localllm.server.dialects.constraint import Constraint, of_response_format, of_schema
from localllm.server.dialects.fields import Body, Budget, StopText, limit_of, sampling_over, stop_texts
from localllm.server.generation import prompting
from localllm.server.generation.conversing import Ask
from localllm.server.generation.job import AnswerPlan, Prepared
from localllm.server.generation.prompting import Wishes
from localllm.server.models.router import ServedModel

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
    thinking_budget: Budget | None = Field(None, description="tokens of reasoning at most; -1 = no limit")


class OllamaBody(Body):
    """What chat and generate have alike."""

    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None

    def _options(self) -> Options:
        return self.options if self.options is not None else Options.model_validate({})

    def generation(self, default: Sampling) -> Generation:
        """How the answer is made: the options over the model's defaults."""
        options = self._options()
        others = ("num_predict", "stop", "thinking_budget")
        sent = {name: getattr(options, name) for name in Options.model_fields if name not in others}
        return Generation(
            sampling_over(default, **sent),
            self.answer_tokens(),
            stop_texts(options.stop),
            thinking_tokens=limit_of(options.thinking_budget),
        )

    def answer_tokens(self) -> int | None:
        """The longest answer asked for; None = the remaining window."""
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

    def constraint(self) -> Constraint | None:
        """`format`: "json" or a schema."""
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return of_response_format({"type": "json_object"})
        if isinstance(self.format, dict):
            return of_schema(self.format)
        raise RequestError('format must be "json" or a JSON schema', param="format")

    def ignored(self) -> list[str]:
        """Options without effect: above all those about loading (num_ctx, num_gpu …), as no request reloads a model.
        Raises UnsupportedError for those that would change the answer."""
        extra = (self.options.model_extra if self.options else None) or {}
        for name, off in _REFUSED_OPTIONS.items():
            if name in extra and extra[name] not in off:
                raise UnsupportedError(f"options.{name} is not implemented", param=f"options.{name}")
        return [f"options.{k}" for k in sorted(extra) if k not in _REFUSED_OPTIONS]


class OllamaChat(OllamaBody):
    """POST /api/chat."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = Field(None, max_length=512)


class OllamaGenerate(OllamaBody):
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
    return _ask(fields, default, fields.messages, tools)


def generate_ask(fields: OllamaGenerate, default: Sampling) -> Ask:
    """The Ask of a prompt that goes through the template."""
    messages = [{"role": "system", "content": fields.system}] if fields.system else []
    return _ask(fields, default, [*messages, {"role": "user", "content": fields.prompt}], [])


def _ask(fields: OllamaBody, default: Sampling, messages: Any, tools: list[dict[str, Any]]) -> Ask:
    wishes = Wishes(tools=tools, choice=choice_of(None, tools), grammar=fields.constraint(), effort=fields.effort())
    return Ask(normalise(messages), fields.generation(default), wishes)


async def raw_job(fields: OllamaGenerate, model: ServedModel, engine: EngineClient) -> Prepared:
    """The job of a raw prompt or one with a suffix."""
    prompt: str | list[int] = fields.prompt
    if fields.suffix:
        prompt = await fim_prompt(engine, fields.prompt, fields.suffix, answer_tokens=fields.answer_tokens())
    return Prepared(
        prompt=prompt,
        add_bos=prompting.wants_bos(engine.info, prompt) if isinstance(prompt, str) else False,
        generation=fields.generation(model.sampling),
        answer=AnswerPlan(grammar=fields.constraint()),
    )
