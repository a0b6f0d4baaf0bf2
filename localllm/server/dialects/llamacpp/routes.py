"""Routes of llama.cpp's server, with its descriptions of models: /props, /slots, and the events of
loading and unloading."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from itertools import count
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localllm.conversation.tools import format_for, has_unknown_format
from localllm.errors import BusyError, RequestError
from localllm.server.dialects import vectors
from localllm.server.dialects.fields import RequestBody, TokenId
from localllm.server.dialects.llamacpp import completion
from localllm.server.dialects.llamacpp.adapters import BODY, adapters_of, scales_of
from localllm.server.dialects.paths import Paths, answer_of
from localllm.server.dialects.route import Route, mount, mount_non_streaming
from localllm.server.dialects.wire import EVENTS, FINGERPRINT
from localllm.server.http.accounts import Account, admins_only, caller
from localllm.server.http.json_body import read_json_list
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.serving import Server

_POLL_S = 0.5
_POLLS_PER_KEEPALIVE = 20
# Query parameters in the OpenAPI document.
_MODEL = {"name": "model", "in": "query", "schema": {"type": "string"}}
_NO_SLOT = {"name": "fail_on_no_slot", "in": "query", "schema": {"type": "string"}}


async def changes(models: ModelRouter) -> AsyncIterator[bytes]:
    """Yield events of loading and unloading: each change after the begin, with load progress."""
    sent = {m.name: _status(m) for m in models.list()}
    for look in count(1):
        for m in models.list():
            status = _status(m)
            if sent.get(m.name) != status:
                sent[m.name] = status
                event = {"model": m.name, "event": "model_status", "data": status}
                yield f"data: {json.dumps(event)}\n\n".encode()
        await asyncio.sleep(_POLL_S)
        if look % _POLLS_PER_KEEPALIVE == 0:
            yield b": keepalive\n"


def _status(model: ServedModel) -> dict[str, Any]:
    if model.state == "loading":
        value = round(model.worker.progress, 2)
        progress = {"stages": ["text_model"], "current": "text_model", "value": value}
        return {"status": "loading", "progress": progress}
    return {"status": "loaded" if model.loaded else "unloaded"}


async def slots(model: ServedModel) -> list[dict[str, Any]]:
    """Return the body of GET /slots: one entry per slot with its running request, then the waiting
    requests.

    Entries contain no prompt text. For requests of other callers, they show only that the slot is
    busy."""
    info = model.info
    if not model.loaded or info is None:
        return []
    jobs: list[dict[str, Any]] = (await model.worker.snapshot()).get("jobs", [])
    running = [j for j in jobs if j["state"] != "waiting"]
    waiting = [j for j in jobs if j["state"] == "waiting"]
    free = max(0, info.n_seq_max - len(running))
    entries = [*running, *[None] * free, *waiting]
    return [_slot(i, info.n_ctx, job, caller()) for i, job in enumerate(entries)]


def _slot(number: int, n_ctx: int, job: dict[str, Any] | None, asks: Account) -> dict[str, Any]:
    slot = {"id": number, "n_ctx": n_ctx, "speculative": True, "is_processing": job is not None}
    if job is None:
        return {**slot, "state": "idle"}
    if not (asks.admin or job["tenant"] == asks.name):
        return {**slot, "state": "busy"}
    max_tokens = job["max_tokens"]
    next_token = {
        "has_next_token": True,
        "has_new_line": False,
        "n_remain": max_tokens - job["generated_tokens"],
        "n_decoded": job["generated_tokens"],
    }
    return {
        **slot,
        "state": job["state"],
        "id_task": job["number"],
        "n_prompt_tokens": job["prompt_tokens"],
        "n_prompt_tokens_processed": job["processed_tokens"],
        "n_prompt_tokens_cache": job["cached_tokens"],
        "params": {**job["sampling"], "n_predict": max_tokens, "max_tokens": max_tokens},
        "next_token": [next_token],
    }


# Bytes that are not UTF-8, in text that an engine detokenised.
_ESCAPES = re.compile("[\udc80-\udcff]")


class TokenizeFields(RequestBody):
    """POST /tokenize."""

    content: str = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeFields(RequestBody):
    """POST /detokenize."""

    tokens: list[TokenId] = Field(default_factory=list)


class NativeEmbedding(RequestBody):
    """POST /embedding."""

    content: vectors.Inputs | None = None
    input: vectors.Inputs | None = None


class ModelFields(RequestBody):
    """POST /models/load and /models/unload."""

    model: Annotated[str, Field(min_length=1, max_length=512)]


_ROUTES = (
    Route(
        "/completion",
        completion.LlamaCppFields,
        completion.translate,
        EVENTS,
        "Continue raw text",
        aliases=("/completions",),
    ),
    Route(
        "/infill",
        completion.InfillFields,
        completion.translate,
        EVENTS,
        "Fill in between a prefix and a suffix, with other files as context",
    ),
)


def routes(server: Server) -> Paths:
    paths = Paths("llama.cpp")
    mount(paths, server, *_ROUTES)
    _vocabulary(paths, server)

    @paths.answers("GET", "/props", parameters=[_MODEL])
    async def props(request: Request) -> dict[str, Any]:
        """Facts about a model. The model is not loaded for this."""
        return _props(server.models.resolve(request.query_params.get("model")))

    @paths.answers("GET", "/models/sse", about="")
    async def model_events(request: Request) -> Response:
        """Stream of loading and unloading events, which Zed uses."""
        if request.method == "HEAD":  # the stream never ends
            return Response(media_type="text/event-stream")
        return StreamingResponse(changes(server.models), media_type="text/event-stream")

    async def embed(fields: NativeEmbedding) -> Any:
        sent = fields.content if fields.content is not None else fields.input
        if sent is None:
            raise RequestError("content is missing", param="content")
        _, rows, _ = await vectors.embed(server, fields.model, vectors.each_input(sent))
        return [{"index": i, "embedding": [vectors.numbers(row)]} for i, row in enumerate(rows)]

    about = "Vectors of texts, in llama.cpp's format"
    mount_non_streaming(paths, server, "/embedding", NativeEmbedding, embed, about, ())

    _managing(paths, server)
    _adapters(paths, server)
    return paths


def _props(model: ServedModel) -> dict[str, Any]:
    info = model.info
    settings = {"n_ctx": model.served_n_ctx, "params": asdict(model.sampling)}
    props: dict[str, Any] = {
        "default_generation_settings": settings,
        "total_slots": 1,
        "model_alias": model.name,
        # Only the file's name: a path would show the folders of this machine.
        "model_path": model.facts.details.get("file", model.name),
        "modalities": {"vision": False, "audio": False},
        "chat_template": "",
        "chat_template_caps": _capabilities(""),
        "bos_token": "",
        "eos_token": "",
        "build_info": FINGERPRINT,
        "is_sleeping": not (model.loaded or model.state == "loading"),
        "models_autoload": True,
    }
    if info is not None:
        template = info.chat_template or ""
        capabilities = _capabilities(template)
        if capabilities["supports_tools"]:
            capabilities["native_format"] = format_for(template).name
        props["total_slots"] = info.n_seq_max
        props["modalities"] = {"vision": info.vision, "audio": bool(info.audio_rate_hz)}
        props["chat_template"] = template
        props["chat_template_caps"] = capabilities
        props["bos_token"] = info.bos_text
        props["eos_token"] = info.eos_text
    return props


def _capabilities(template: str) -> dict[str, Any]:
    """Return llama.cpp's `chat_template_caps`."""
    writes_calls = not has_unknown_format(template)
    return {
        "supports_tools": writes_calls,
        "supports_tool_calls": writes_calls,
        "supports_system_role": True,
        "supports_parallel_tool_calls": True,
        "native_format": None,
    }


def _piece(text: str) -> str | list[int]:
    """Return a token's text, or its bytes if they are not text on their own."""
    if _ESCAPES.search(text):
        return list(text.encode("utf-8", "surrogateescape"))
    return text


def _vocabulary(paths: Paths, server: Server) -> None:
    async def tokenize(fields: TokenizeFields) -> Any:
        model = server.models.resolve(fields.model)
        with model.lease():
            engine = await model.engine()
            tokens = await engine.tokenize(
                fields.content, special=fields.parse_special, add_bos=fields.add_special
            )
            if not fields.with_pieces:
                return {"tokens": tokens}
            named = []
            for token in tokens:
                text = await engine.detokenize([token])
                named.append({"id": token, "piece": _piece(text)})
            return {"tokens": named}

    async def detokenize(fields: DetokenizeFields) -> Any:
        model = server.models.resolve(fields.model)
        with model.lease():
            engine = await model.engine()
            for token in fields.tokens:
                if token >= engine.info.n_vocab:
                    raise RequestError(f"token {token} is outside the vocabulary", param="tokens")
            text = await engine.detokenize(fields.tokens)
        return {"content": text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")}

    mount_non_streaming(
        paths, server, "/tokenize", TokenizeFields, tokenize, "Token ids of a text", ("tokens",)
    )
    mount_non_streaming(
        paths,
        server,
        "/detokenize",
        DetokenizeFields,
        detokenize,
        "Text of token ids",
        ("content",),
    )


def _adapters(paths: Paths, server: Server) -> None:
    listed = answer_of(kind="array")

    @paths.answers("GET", "/lora-adapters", parameters=[_MODEL], responses=listed)
    async def list_adapters(request: Request) -> list[dict[str, Any]]:
        """The LoRA adapters that are loaded with a model, with their scales in requests without
        `lora`."""
        return adapters_of(await server.models.find(request.query_params.get("model")))

    @paths.answers("POST", "/lora-adapters", parameters=[_MODEL], requestBody=BODY)
    async def set_scales(request: Request) -> dict[str, Any]:
        """Set the scales of a model's LoRA adapters in requests without `lora`. Adapters that are
        not in the list get scale 0."""
        admins_only("changing the adapters of a model")
        sent = await read_json_list(request, server.settings)
        model = await server.models.find(request.query_params.get("model"))
        model.worker.adapters = scales_of(sent, len(model.facts.adapters))
        return {"success": True}


def _managing(paths: Paths, server: Server) -> None:
    under_way: set[asyncio.Task[Any]] = set()

    def ended(task: asyncio.Task[Any]) -> None:
        """Handle the end of a load. The model's status and the next request report an error."""
        under_way.discard(task)
        if not task.cancelled():
            task.exception()

    async def load(fields: ModelFields) -> Any:
        admins_only("loading a model")
        model = await server.models.find(fields.model)
        task = asyncio.create_task(model.engine())
        under_way.add(task)
        task.add_done_callback(ended)
        return {"success": True}

    async def unload(fields: ModelFields) -> Any:
        admins_only("unloading a model")
        # The model is unloaded even if the client disconnects.
        await asyncio.shield(server.models.resolve(fields.model).worker.unload())
        return {"success": True}

    mount_non_streaming(
        paths,
        server,
        "/models/load",
        ModelFields,
        load,
        "Start to load a model; `status` in the model lists shows the progress. Returns an "
        "error if the model does not fit.",
        ("success",),
    )
    mount_non_streaming(
        paths,
        server,
        "/models/unload",
        ModelFields,
        unload,
        "Unload a model and free its memory. Returns 503 while the model answers requests.",
        ("success",),
    )

    @paths.answers(
        "GET", "/slots", parameters=[_MODEL, _NO_SLOT], responses=answer_of(kind="array")
    )
    async def list_slots(request: Request) -> list[dict[str, Any]]:
        """The slots of a loaded model, without prompt text. [] for a model that is not loaded."""
        asked = request.query_params
        found = await slots(server.models.resolve(asked.get("model")))
        wants_free = asked.get("fail_on_no_slot", "") not in ("", "0", "false")
        if wants_free and all(slot["is_processing"] for slot in found):
            raise BusyError("no slot is free")
        return found
