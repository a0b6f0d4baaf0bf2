"""Writes in Ollama's format: an answer's JSON lines, whole replies, errors; and the models:
/api/tags, /api/ps, /api/show."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from localllm.engine.messages import Timings, TokenLogprob
from localllm.errors import LocalLLMError
from localllm.server.dialects.wire import arguments_object, logprob_entry, token_logprob
from localllm.server.generation.job import Outcome, Reply, ReplyUsage, ReplyWriter
from localllm.server.http.asgi import new_id
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


def model_details(model: ServedModel) -> dict[str, Any]:
    info = model.info
    return {
        "parent_model": "",
        "format": str(model.facts.details.get("format", "gguf")),
        "family": info.architecture if info else str(model.facts.details.get("architecture", "")),
        "families": [info.architecture] if info else [],
        "parameter_size": f"{info.n_params / 1e9:.1f}B" if info else "",
        "quantization_level": str(model.facts.details.get("quant", "")),
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
    known = model.facts.details.get("digest")
    found = known() if callable(known) else known
    return str(found or hashlib.sha256(model.name.encode()).hexdigest())


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
    own_s = idle_s if model.worker.idle_s is None else model.worker.idle_s
    if not own_s or math.isinf(own_s):
        return "0001-01-01T00:00:00Z"
    silent_s = (
        0.0 if model.worker.in_use else asyncio.get_running_loop().time() - model.worker.last_used_s
    )
    expires = datetime.now(UTC) + timedelta(seconds=own_s - silent_s)
    return expires.isoformat().replace("+00:00", "Z")


def show(model: ServedModel, template: str) -> dict[str, Any]:
    """/api/show. `template` mentions `.Suffix` only for models with FIM, which Continue looks
    for."""
    info = model.info
    read = model.facts.details.get("header")
    header: dict[str, Any] = read() if callable(read) else {}
    architecture = info.architecture if info else header.get("architecture", "unknown")
    n_params = info.n_params if info else header.get("parameter_count")
    details = model_details(model)
    if info is None and header:
        details |= {"family": architecture, "families": [architecture]}
        details["parameter_size"] = f"{n_params / 1e9:.1f}B" if n_params else ""
    width = (
        {f"{architecture}.embedding_length": header["embedding_length"]}
        if "embedding_length" in header
        else {}
    )
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
            "general.parameter_count": n_params,
            f"{architecture}.context_length": model.served_n_ctx or header.get("context_length"),
            **width,
        },
        "capabilities": capabilities,
        "modified_at": tag(model)["modified_at"],
    }


def _parameters(model: ServedModel) -> list[str]:
    """The sampling defaults, one per line."""
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    lines = (
        []
        if model.facts.embeds
        else [f"{name:<30} {getattr(model.sampling, name):g}" for name in names]
    )
    return [*lines, f"{'num_ctx':<30} {model.served_n_ctx}"] if model.served_n_ctx else lines


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
    """Writes JSON lines. A tool call is one object, so it waits until its arguments are
    complete."""

    def __init__(self, outbox: Outbox, model: str, part: Part) -> None:
        self._outbox, self._model, self._part = outbox, model, part
        self._call: tuple[int, str, list[str]] | None = None

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        self._flush()
        if text or logprobs:
            self._line({**self._part(text), **_logprobs(logprobs)})

    def reasoning(self, choice: int, text: str) -> None:
        self._line(self._part("", thinking=text))

    def call_start(self, choice: int, index: int, name: str) -> None:
        self._flush()
        self._call = (index, name, [])

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        assert self._call is not None
        self._call[2].append(text)

    def finish(self, choice: int, outcome: Outcome) -> None:
        if outcome.half_call:
            self._call = None
        self._flush()
        self._outcome = outcome

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        self._line({**self._part(""), **done(self._outcome, usage, timings)})

    def _flush(self) -> None:
        if self._call is not None:
            index, name, pieces = self._call
            self._call = None
            self._line(self._part("", calls=[call(index, name, "".join(pieces))]))

    def _line(self, body: Mapping[str, Any]) -> None:
        line = {"model": self._model, "created_at": now(), **body}
        line.setdefault("done", False)
        self._outbox.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def answer(reply: Reply, model: str, part: Part) -> dict[str, Any]:
    """The whole answer, in one line."""
    choice = reply.choices[0]
    calls = [call(i, c.name, c.arguments) for i, c in enumerate(choice.calls)]
    body = {**part(choice.text, choice.reasoning, calls), **_logprobs(choice.logprobs)}
    return {
        "model": model,
        "created_at": now(),
        **body,
        **done(choice.outcome, reply.usage, reply.timings),
    }


def loaded(model: str, part: Part, reason: str = "load") -> dict[str, Any]:
    """The answer to a request that only loads or unloads (`reason`) its model."""
    return {
        "model": model,
        "created_at": now(),
        **part(""),
        "done": True,
        "done_reason": reason,
    }


def call(index: int, name: str, arguments: str) -> dict[str, Any]:
    """A tool call with its arguments as an object."""
    function = {"index": index, "name": name, "arguments": arguments_object(arguments)}
    return {"id": new_id("call_"), "function": function}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs`, where they were asked for."""
    entries = [logprob_entry(t) if t.top else token_logprob(t.text, t.logprob) for t in tokens]
    return {"logprobs": entries} if entries else {}


def done(outcome: Outcome, usage: ReplyUsage, timings: Timings) -> dict[str, Any]:
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
    return json.dumps(ollama_envelope(error)).encode() + b"\n"


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
