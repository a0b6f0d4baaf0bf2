"""Routes of Ollama's API."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from localllm.engine.worker.client import EngineClient
from localllm.errors import ModelNotFoundError, UnsupportedError
from localllm.server.dialects import vectors
from localllm.server.dialects.known import read
from localllm.server.dialects.ollama import lines, requests
from localllm.server.dialects.ollama.lines import Part
from localllm.server.dialects.ollama.requests import (
    OllamaBody,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaManaged,
    OllamaPull,
)
from localllm.server.dialects.openapi import body_of
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import PreloadRequest, Route, mount, mount_whole
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.job import GenerationJob
from localllm.server.generation.prompt import text_job
from localllm.server.http.accounts import admins_only
from localllm.server.http.asgi import answer_headers
from localllm.server.http.json_body import read_json
from localllm.server.http.streaming import Outbox, StreamResponse, unless_gone
from localllm.server.models.router import ServedModel
from localllm.server.models.served import ModelStore, StoreProgress
from localllm.server.serving import Dialect, JobFactory, Server, TranslatedRequest

# At most one progress line in so many seconds.
_INTERVAL_S = 0.2
_SHA256_DIGITS = 64
_NAMED_DIGITS = 12
# By the state of a download, where nothing is counted.
_STATUS = {
    "listing": "pulling manifest",
    "verifying": "verifying sha256 digest",
    "done": "writing manifest",
    "waiting": "waiting for the hub",
}

Line = dict[str, Any]


class _DisconnectedError(Exception):
    """The client disconnected."""


async def _pull(
    thread: ThreadPoolExecutor, store: ModelStore, ref: str, report: Callable[[Line], None]
) -> None:
    """Download `ref` in `thread`, reporting lines to `report`. If cancelled it stops, and the next
    call resumes. Raises what the store raises."""
    loop, left = asyncio.get_running_loop(), threading.Event()
    lines = _ProgressLines()

    def on_progress(progress: StoreProgress) -> None:
        if left.is_set():
            raise _DisconnectedError
        line = lines.line(progress)
        if line is not None:
            loop.call_soon_threadsafe(report, line)

    try:
        await loop.run_in_executor(thread, store.pull, ref, on_progress)
    finally:
        left.set()
    report({"status": "success"})


class _ProgressLines:
    """Turns a download's progress into Ollama's lines, leaving out repetitions."""

    def __init__(self) -> None:
        self._digest, self._status, self._next_s = "", "", 0.0

    def line(self, progress: StoreProgress) -> Line | None:
        """The line for this moment; None if it says nothing new."""
        if not self._digest and len(progress.digest) == _SHA256_DIGITS:
            # Clients show one bar per digest: keep the first for the whole model.
            self._digest = progress.digest
        line: Line = {
            "status": _STATUS.get(
                progress.state, f"pulling {self._digest[:_NAMED_DIGITS]}".rstrip()
            )
        }
        if progress.state not in _STATUS and self._digest:
            counts = {"total": progress.total_bytes, "completed": progress.done_bytes}
            line |= {"digest": f"sha256:{self._digest}", **counts}
        now = time.monotonic()
        if (
            line["status"] == self._status
            and now < self._next_s
            and progress.done_bytes < progress.total_bytes
        ):
            return None
        self._status, self._next_s = line["status"], now + _INTERVAL_S
        return line


def allowed(store: ModelStore | None) -> ModelStore:
    """The store, if clients may use it; else raises UnsupportedError."""
    if store is None:
        raise UnsupportedError(
            "models are not fetched or removed over HTTP here: start the server with --allow-pull "
            "(or set allow_pull), or "
            "do it on the command line: `localllm pull`, `localllm models rm`"
        )
    return store


# The Ollama release whose API this is; VS Code requires at least 0.6.4.
VERSION = "0.12.11"
# No keep-alives: clients parse every line, even a blank one.
_OLLAMA = Dialect("application/x-ndjson", lines.frame_error, lambda _: b"", streams=True)
_UNSUPPORTED = ("/api/create", "/api/push", "/api/copy")


def chat(fields: OllamaChat, model: ServedModel) -> TranslatedRequest | PreloadRequest:
    """A chat; without messages it loads the model, or unloads it."""
    ignored = fields.ignored()
    if not fields.messages:
        return _preload(fields, model, lines.chat_part)
    chat, omitted = requests.chat_request(fields, model.sampling_for(fields.effort()))
    return _translated(chat, model, lines.chat_part, [*ignored, *omitted], fields)


def generate(fields: OllamaGenerate, model: ServedModel) -> TranslatedRequest | PreloadRequest:
    """A prompt: templated, raw, or with a suffix."""
    ignored = fields.ignored()
    if not fields.prompt and not fields.suffix:
        return _preload(fields, model, lines.generated_part)
    task: ChatRequest | JobFactory
    if fields.untemplated:
        grammar = fields.constraint()

        async def raw(engine: EngineClient) -> GenerationJob:
            generation = fields.generation(model.sampling)
            return await text_job(
                engine, [fields.prompt], generation, grammar, suffix=fields.suffix
            )

        task = raw
    else:
        task = requests.generate_request(fields, model.sampling_for(fields.effort()))
    return _translated(task, model, lines.generated_part, ignored, fields)


def _preload(fields: OllamaBody, model: ServedModel, part: Part) -> PreloadRequest:
    keep_s = requests.keep_alive_s(fields.keep_alive)
    reason = "unload" if keep_s == 0 else "load"
    return PreloadRequest(lines.loaded(model.name, part, reason), keep_s)


def _translated(
    task: ChatRequest | JobFactory,
    model: ServedModel,
    part: Part,
    ignored: list[str],
    fields: OllamaBody,
) -> TranslatedRequest:
    return TranslatedRequest(
        task,
        lambda reply, job: lines.answer(reply, model.name, part),
        lambda outbox, job, progress: lines.JsonLines(outbox, model.name, part),
        tuple(ignored),
        keep_s=requests.keep_alive_s(fields.keep_alive),
    )


CHAT = Route(
    "/api/chat",
    OllamaChat,
    chat,
    _OLLAMA,
    "Answer a conversation; streams unless told not to",
    ("message", "done"),
)
GENERATE = Route(
    "/api/generate",
    OllamaGenerate,
    generate,
    _OLLAMA,
    "Continue a prompt: through the template, raw, or filling in before a suffix",
    ("response", "done"),
)

EMBED = Route(
    "/api/embed",
    OllamaEmbed,
    requests.translate_embed,
    _OLLAMA,
    "Turn texts into vectors",
)
OLDER_EMBED = Route(
    "/api/embeddings",
    OllamaEmbeddings,
    requests.translate_older_embed,
    _OLLAMA,
    "Turn one text into a vector: the older form",
)


def routes(server: Server) -> Paths:
    paths = Paths("Ollama")
    mount(paths, server, CHAT, GENERATE)
    _about_models(paths, server)
    vectors.mount(paths, server, EMBED, OLDER_EMBED)
    _managing(paths, server)
    return paths


def _managing(paths: Paths, server: Server) -> None:
    # One model at a time is downloaded.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pull")

    @paths.answers(
        "POST", "/api/pull", **body_of(OllamaPull, "status", streams="application/x-ndjson")
    )
    async def pull(request: Request) -> Response:
        """Fetch a model, where --allow-pull lets clients do that"""
        admins_only("fetching a model")
        store = allowed(server.store)
        fields, ignored = read(OllamaPull, await read_json(request, server.settings))
        name, headers = fields.wanted(), answer_headers(ignored)
        if fields.stream is False:
            reported: list[dict[str, Any]] = []
            await unless_gone(request.receive, _pull(thread, store, name, reported.append))
            return (
                JSONResponse(reported[-1], headers=headers)
                if reported
                else Response(status_code=499)
            )

        async def produce(outbox: Outbox) -> None:
            await _pull(
                thread, store, name, lambda line: outbox.write(json.dumps(line).encode() + b"\n")
            )

        return StreamResponse(
            produce,
            settings=server.settings,
            media_type=_OLLAMA.media_type,
            keepalive=lambda: b"",
            frame_error=lines.frame_error,
            headers=headers,
        )

    @paths.answers("DELETE", "/api/delete", **body_of(OllamaManaged))
    async def delete(request: Request) -> Response:
        """Remove a model from this disk, where --allow-pull lets clients do that"""
        admins_only("removing a model")
        store = allowed(server.store)
        fields, ignored = read(OllamaManaged, await read_json(request, server.settings))
        name = fields.wanted()
        with suppress(ModelNotFoundError):
            # Mapped files would keep their disk space; a model in use is not removed.
            model = await server.models.find(name)
            if model.loaded:
                await model.worker.unload()
        await asyncio.to_thread(store.remove, name)
        return Response(headers=answer_headers(ignored))

    @paths.answers("POST", *_UNSUPPORTED, about="")
    async def unsupported(request: Request) -> Response:
        raise UnsupportedError(
            "models are neither made nor published over HTTP: those of this disk are managed on "
            "the command line, `localllm models`"
        )


def _about_models(paths: Paths, server: Server) -> None:
    @paths.answers("GET", "/", about="")
    async def root(request: Request) -> Response:
        """What Ollama's clients look for."""
        return PlainTextResponse("Ollama is running")

    @paths.answers("GET", "/api/version")
    async def version(request: Request) -> dict[str, str]:
        """The release of Ollama whose API this is."""
        return {"version": VERSION}

    @paths.answers("GET", "/api/tags")
    async def tags(request: Request) -> dict[str, Any]:
        """The models on offer."""
        return lines.tags(server.models)

    @paths.answers("GET", "/api/ps")
    async def ps(request: Request) -> dict[str, Any]:
        """The models that are loaded."""
        loaded = [m for m in server.models.list() if m.loaded]
        return {"models": [lines.running(m, server.models.idle_s) for m in loaded]}

    async def show(fields: OllamaManaged) -> Any:
        model = await server.models.find(fields.wanted())
        template = (model.info.chat_template or "") if model.info else ""
        return await asyncio.to_thread(lines.show, model, template)

    mount_whole(
        paths, server, "/api/show", OllamaManaged, show, "One model's facts", ("capabilities",)
    )
