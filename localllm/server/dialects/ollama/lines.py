"""Writes in Ollama's format: an answer's JSON lines, whole replies, errors; and the models:
/api/tags, /api/ps, /api/show."""

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
    """/api/tags: our models, and those of upstreams that speak Ollama's API."""
    remote = [m for m in models.elsewhere() if "ollama" in m.upstream.speaks]
    return {"models": [*map(tag, models.names()), *map(remote_tag, remote)]}


def remote_tag(model: RemoteModel) -> dict[str, Any]:
    """An upstream's model, of which only the name is known, in the form of Ollama's own remote
    models."""
    details = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": ""}
    return {
        "name": model.name,
        "model": model.name,
        "remote_model": model.theirs,
        "remote_host": model.upstream.name,
        "modified_at": "1970-01-01T00:00:00Z",
        "size": 0,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": {**details, "quantization_level": ""},
    }


def model_details(model: ServedModel, header: Mapping[str, Any] = {}) -> dict[str, Any]:
    """What a model is. `header`: what its file says, of one that isn't loaded."""
    info = model.info
    known = model.facts.details
    read = header.get("architecture") or str(known.get("architecture", ""))
    family = info.architecture if info else read
    n_params = info.n_params if info else header.get("parameter_count")
    return {
        "parent_model": "",
        "format": str(known.get("format", "gguf")),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": f"{n_params / 1e9:.1f}B" if n_params else "",
        "quantization_level": str(known.get("quant", "")),
    }


def tag(model: ServedModel) -> dict[str, Any]:
    info = model.info
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.fromtimestamp(model.created_s, UTC)
        .isoformat()
        .replace("+00:00", "Z"),
        "size": info.weights_bytes if info else int(model.facts.details.get("bytes", 0)),
        "digest": digest(model),
        "details": model_details(model),
    }


def digest(model: ServedModel) -> str:
    """SHA-256 of the model's file, or of its name if the file is unknown: `ollama list` needs
    twelve digits."""
    known = model.facts.details.get("digest", str)()
    return str(known or hashlib.sha256(model.name.encode()).hexdigest())


def running(model: ServedModel, idle_s: float) -> dict[str, Any]:
    """One entry of /api/ps; `idle_s`: the server's idle time (0: never)."""
    more = {
        "expires_at": _expires_at(model, idle_s),
        "size_vram": 0,
        "context_length": model.served_n_ctx,
    }
    return {**tag(model), **more}


def _expires_at(model: ServedModel, idle_s: float) -> str:
    """When it will be unloaded; the year 1 means never to `ollama ps`."""
    if model.worker.idle_s is None:
        own_s = idle_s
    else:
        own_s = model.worker.idle_s
    if not own_s or math.isinf(own_s):
        return "0001-01-01T00:00:00Z"
    expires = datetime.now(UTC) + timedelta(seconds=own_s - model.worker.silent_s)
    return expires.isoformat().replace("+00:00", "Z")


def show(model: ServedModel, template: str) -> dict[str, Any]:
    """/api/show. `template` mentions `.Suffix` only for models with FIM, which Continue looks
    for."""
    info = model.info
    header: dict[str, Any] = model.facts.details.get("header", dict)()
    details = model_details(model, header)
    architecture = details["family"] or "unknown"
    if "embedding_length" in header:
        width = {f"{architecture}.embedding_length": header["embedding_length"]}
    else:
        width = {}
    capabilities = model.capabilities
    parameters = _parameters(model)
    if "insert" in capabilities:
        template += "{{/* .Suffix */}}"
    return {
        "modelfile": f"FROM {model.name}\n" + "".join(f"PARAMETER {line}\n" for line in parameters),
        "parameters": "\n".join(parameters),
        "template": template,
        "details": details,
        "model_info": {
            "general.architecture": architecture,
            "general.basename": model.name,
            "general.parameter_count": info.n_params if info else header.get("parameter_count"),
            f"{architecture}.context_length": model.served_n_ctx or header.get("context_length"),
            **width,
        },
        "capabilities": capabilities,
        "modified_at": tag(model)["modified_at"],
    }


def _parameters(model: ServedModel) -> list[str]:
    """The sampling defaults, one per line."""
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    if model.facts.embeds:
        lines = []
    else:
        lines = [f"{name:<30} {getattr(model.sampling, name):g}" for name in names]
    if model.served_n_ctx:
        return [*lines, f"{'num_ctx':<30} {model.served_n_ctx}"]
    return lines


# A function that puts text, thinking and tool calls where the lines of a path have them.
Part: TypeAlias = Callable[..., dict[str, Any]]


def chat_part(
    text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The answer's part of a line of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generated_part(text: str, thinking: str = "", calls: object = None) -> dict[str, Any]:
    """The same of /api/generate, which offers no tools."""
    return {"response": text, **({"thinking": thinking} if thinking else {})}


class JsonLines(ReplyWriter):
    """Writes JSON lines. A tool call is one object, so it waits for the end."""

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
    """The whole answer, in one line."""
    choice = reply.choices[0]
    return {
        "model": model,
        "created_at": now(),
        **part(choice.text, choice.reasoning, _calls(reply)),
        **_logprobs(choice.logprobs),
        **_done(reply),
    }


def loaded(model: str, part: Part, reason: str) -> dict[str, Any]:
    """The answer to a request that only loads or unloads (`reason`) its model."""
    return {
        "model": model,
        "created_at": now(),
        **part(""),
        "done": True,
        "done_reason": reason,
    }


def _calls(reply: Reply) -> list[dict[str, Any]]:
    """The tool calls with their arguments as objects."""
    return [
        {
            "id": call.id,
            "function": {
                "index": i,
                "name": call.name,
                "arguments": arguments_object(call.arguments),
            },
        }
        for i, call in enumerate(reply.choices[0].calls)
    ]


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs`, where they were asked for."""
    entries = [logprob_entry(t) if t.top else token_logprob(t.text, t.logprob) for t in tokens]
    if entries:
        return {"logprobs": entries}
    return {}


def _done(reply: Reply) -> dict[str, Any]:
    """The fields of the last line; durations in nanoseconds."""
    usage = reply.usage
    timings = reply.timings
    total = timings.queued_s + timings.prefill_s + timings.decode_s
    return {
        "done": True,
        "done_reason": "length" if reply.choices[0].outcome.reason == "length" else "stop",
        "total_duration": int(total * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(timings.prefill_s * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(timings.decode_s * 1e9),
    }


def frame_error(error: LocalLLMError) -> bytes:
    return json.dumps(ollama_envelope(error)).encode() + b"\n"


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
