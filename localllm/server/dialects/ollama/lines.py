"""Output in Ollama's format: JSON lines of an answer, complete replies and errors. Also the model
lists: /api/tags, /api/ps, /api/show."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from localllm.engine.messages import TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.wire import arguments_object, logprob_entry, token_logprob
from localllm.server.generation.job import Reply, ReplyWriter
from localllm.server.http.errors import ollama_envelope
from localllm.server.http.streaming import Outbox
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.proxy.upstreams import RemoteModel


def tags(models: ModelRouter) -> dict[str, Any]:
    """Return the body of /api/tags: this server's models, and those of upstreams that support
    Ollama's API."""
    listed = [tag(model) for model in models.names()]
    for remote in models.remote_models():
        if "ollama" in remote.upstream.speaks:
            listed.append(remote_tag(remote))
    return {"models": listed}


def remote_tag(model: RemoteModel) -> dict[str, Any]:
    """Return the entry of an upstream's model, in the format of Ollama's remote models. Only the
    model's name is known."""
    return {
        "name": model.name,
        "model": model.name,
        "remote_model": model.upstream_name,
        "remote_host": model.upstream.name,
        "modified_at": "1970-01-01T00:00:00Z",
        "size": 0,
        "digest": _digest_of(model.name),
        "details": _details(),
    }


def _details(form: str = "", family: str = "", size: str = "", quant: str = "") -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": form,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": size,
        "quantization_level": quant,
    }


def model_details(model: ServedModel, header: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the details of a model. `header`: facts from the model's file, used if the model is
    not loaded."""
    known = model.facts.details
    if model.info:
        family = model.info.architecture
    else:
        family = header.get("architecture") or str(known.get("architecture", ""))
    n_params = _n_params(model, header)
    size = f"{n_params / 1e9:.1f}B" if n_params else ""
    return _details(str(known.get("format", "gguf")), family, size, str(known.get("quant", "")))


def _n_params(model: ServedModel, header: Mapping[str, Any]) -> int | None:
    if model.info:
        return model.info.n_params
    return header.get("parameter_count")


def tag(model: ServedModel) -> dict[str, Any]:
    if model.info:
        size_bytes = model.info.weights_bytes
    else:
        size_bytes = int(model.facts.details.get("bytes", 0))
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _timestamp(datetime.fromtimestamp(model.created_s, UTC)),
        "size": size_bytes,
        "digest": digest(model),
        "details": model_details(model),
    }


def digest(model: ServedModel) -> str:
    """Return the SHA-256 of the model's file, or of its name if the file is unknown. `ollama list`
    needs twelve digits."""
    known = model.facts.details.get("digest", str)()
    return str(known or _digest_of(model.name))


def _digest_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def running(model: ServedModel, idle_s: float) -> dict[str, Any]:
    """Return one entry of /api/ps. `idle_s`: the server's idle time before it unloads a model; 0
    means never."""
    return {
        **tag(model),
        "expires_at": _expires_at(model, idle_s),
        "size_vram": 0,
        "context_length": model.served_n_ctx,
    }


def _expires_at(model: ServedModel, idle_s: float) -> str:
    """Return the time when the model will be unloaded. `ollama ps` reads the year 1 as never."""
    if model.worker.idle_s is not None:
        idle_s = model.worker.idle_s
    if not idle_s or math.isinf(idle_s):
        return "0001-01-01T00:00:00Z"
    return _timestamp(datetime.now(UTC) + timedelta(seconds=idle_s - model.worker.silent_s))


def show(model: ServedModel, template: str) -> dict[str, Any]:
    """Return the body of /api/show. Continue looks for `.Suffix` in the template, so it is added
    for models that support fill-in-the-middle."""
    header: dict[str, Any] = model.facts.details.get("header", dict)()
    details = model_details(model, header)
    architecture = details["family"] or "unknown"
    info = {
        "general.architecture": architecture,
        "general.basename": model.name,
        "general.parameter_count": _n_params(model, header),
        f"{architecture}.context_length": model.served_n_ctx or header.get("context_length"),
    }
    if "embedding_length" in header:
        info[f"{architecture}.embedding_length"] = header["embedding_length"]
    parameters = _parameters(model)
    modelfile = [f"FROM {model.name}\n"]
    modelfile += (f"PARAMETER {line}\n" for line in parameters)
    capabilities = model.capabilities
    if "insert" in capabilities:
        template += "{{/* .Suffix */}}"
    return {
        "modelfile": "".join(modelfile),
        "parameters": "\n".join(parameters),
        "template": template,
        "details": details,
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": tag(model)["modified_at"],
    }


def _parameters(model: ServedModel) -> list[str]:
    """Return the sampling defaults, one per line."""
    lines = []
    if not model.facts.embeds:
        for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty"):
            lines.append(f"{name:<30} {getattr(model.sampling, name):g}")
    if model.served_n_ctx:
        lines.append(f"{'num_ctx':<30} {model.served_n_ctx}")
    return lines


# Puts text, thinking and tool calls into the fields that the lines of a path use.
Part: TypeAlias = Callable[..., dict[str, Any]]


def chat_part(
    text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the answer's part of a line of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generated_part(text: str, thinking: str = "", calls: object = None) -> dict[str, Any]:
    """Return the answer's part of a line of /api/generate, which has no tools."""
    if thinking:
        return {"response": text, "thinking": thinking}
    return {"response": text}


class JsonLines(ReplyWriter):
    """Writes JSON lines. A tool call is one object, so it is written at the end."""

    def __init__(self, outbox: Outbox, model: str, part: Part) -> None:
        self._outbox = outbox
        self._model = model
        self._part = part

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if text or logprobs:
            self._line({**self._part(text), **_logprobs(logprobs)})

    def reasoning(self, choice: int, text: str) -> None:
        self._line(self._part("", thinking=text))

    def end(self, reply: Reply) -> None:
        for call in _calls(reply):
            self._line(self._part("", calls=[call]))
        self._line({**self._part(""), **_done(reply)})

    def _line(self, body: Mapping[str, Any]) -> None:
        line = {"model": self._model, "created_at": now(), "done": False, **body}
        self._outbox.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def answer(reply: Reply, model: str, part: Part) -> dict[str, Any]:
    """Return the complete answer as one object."""
    choice = reply.choices[0]
    return {
        "model": model,
        "created_at": now(),
        **part(choice.text, choice.reasoning, _calls(reply)),
        **_logprobs(choice.logprobs),
        **_done(reply),
    }


def loaded(model: str, part: Part, reason: str) -> dict[str, Any]:
    """Return the answer to a request that only loads or unloads its model. `reason` is "load" or
    "unload"."""
    return {
        "model": model,
        "created_at": now(),
        **part(""),
        "done": True,
        "done_reason": reason,
    }


def _calls(reply: Reply) -> list[dict[str, Any]]:
    """Return the tool calls with their arguments as objects."""
    calls = []
    for i, call in enumerate(reply.choices[0].calls):
        arguments = arguments_object(call.arguments)
        function = {"index": i, "name": call.name, "arguments": arguments}
        calls.append({"id": call.id, "function": function})
    return calls


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the field `logprobs`, or an empty dict if there are no log-probabilities."""
    if not tokens:
        return {}
    entries = []
    for token in tokens:
        if token.top:
            entries.append(logprob_entry(token))
        else:
            entries.append(token_logprob(token.text, token.logprob))
    return {"logprobs": entries}


def _done(reply: Reply) -> dict[str, Any]:
    """Return the fields of the last line. Durations are in nanoseconds."""
    timings = reply.timings
    total_s = timings.queued_s + timings.prefill_s + timings.decode_s
    cut = reply.choices[0].outcome.reason == "length"
    return {
        "done": True,
        "done_reason": "length" if cut else "stop",
        "total_duration": int(total_s * 1e9),
        "load_duration": 0,
        "prompt_eval_count": reply.usage.prompt_tokens,
        "prompt_eval_duration": int(timings.prefill_s * 1e9),
        "eval_count": reply.usage.completion_tokens,
        "eval_duration": int(timings.decode_s * 1e9),
    }


def frame_error(error: LocalLLMError) -> bytes:
    return json.dumps(ollama_envelope(error)).encode() + b"\n"


def now() -> str:
    return _timestamp(datetime.now(UTC))


def _timestamp(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
