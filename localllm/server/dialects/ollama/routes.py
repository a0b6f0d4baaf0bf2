"""Routes of Ollama's API."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from localllm.conversation.messages import normalise
from localllm.conversation.tools.prompt import checked_tools
from localllm.engine.worker.client import EngineClient
from localllm.errors import ModelNotFoundError, UnsupportedError
from localllm.server.dialects import vectors
from localllm.server.dialects.fields import each
from localllm.server.dialects.known import read
from localllm.server.dialects.ollama import lines, requests
from localllm.server.dialects.openapi import body_of
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.route import DirectAnswer, Route, mount, mount_non_streaming
from localllm.server.dialects.toolbox import Toolbox
from localllm.server.generation.chat import ChatRequest
from localllm.server.generation.job import GenerationJob, PrefillProgress, Reply, ReplyWriter
from localllm.server.generation.prompt import text_job
from localllm.server.http.accounts import admins_only
from localllm.server.http.asgi import answer_headers
from localllm.server.http.json_body import read_json
from localllm.server.http.streaming import Outbox, StreamResponse, cancel_on_disconnect
from localllm.server.models.router import ServedModel
from localllm.server.models.served import ModelStore, StoreProgress
from localllm.server.serving import Dialect, JobFactory, Server, TranslatedRequest

_SHA256_DIGITS = 64
# Status texts for the states of a download without a byte count.
_STATUS = {
    "listing": "pulling manifest",
    "verifying": "verifying sha256 digest",
    "done": "writing manifest",
    "waiting": "waiting for the hub",
}

Line = dict[str, Any]


class _DisconnectedError(Exception):
    """The client disconnected."""


async def _pull(thread: ThreadPoolExecutor, store: ModelStore, ref: str, outbox: Outbox) -> None:
    """Download `ref` in `thread`. A cancelled download stops, and the next call resumes it. Raises
    the store's errors.

    Progress is written to `outbox`, at most one line for each ten-thousandth of the download."""
    loop = asyncio.get_running_loop()

    def report(line: Line) -> None:
        outbox.write(json.dumps(line).encode() + b"\n")

    left = threading.Event()
    digest = ""
    reported = ("", 0)

    def on_progress(progress: StoreProgress) -> None:
        nonlocal digest, reported
        if left.is_set():
            raise _DisconnectedError
        if len(progress.digest) == _SHA256_DIGITS:
            # Clients show one bar per digest. The first digest is used for the whole model.
            digest = digest or progress.digest
        line: Line
        if progress.state in _STATUS:
            line = {"status": _STATUS[progress.state]}
        elif digest:
            line = {
                "status": f"pulling {digest[:12]}",
                "digest": f"sha256:{digest}",
                "total": progress.total_bytes,
                "completed": progress.done_bytes,
            }
        else:
            line = {"status": "pulling"}
        share = 10_000 * progress.done_bytes // max(1, progress.total_bytes)
        if reported != (line["status"], share):
            reported = line["status"], share
            loop.call_soon_threadsafe(report, line)

    try:
        await loop.run_in_executor(thread, store.pull, ref, on_progress)
    finally:
        left.set()
    report({"status": "success"})


def allowed(store: ModelStore | None) -> ModelStore:
    """Return the store if clients may use it. Raises UnsupportedError otherwise."""
    if store is None:
        raise UnsupportedError(
            "this server does not download or remove models over HTTP: start it with "
            "--allow-pull (or set allow_pull), or use the command line: `localllm "
            "pull`, `localllm models rm`"
        )
    return store


# The release of Ollama whose API this server implements. VS Code requires at least 0.6.4.
VERSION = "0.12.11"


def _keepalive(*_: object) -> bytes:
    """Return a space before the next line's JSON. Clients parse every line, even a blank one."""
    return b" "


_OLLAMA = Dialect("application/x-ndjson", lines.frame_error, _keepalive, streams=True)


def chat(fields: requests.OllamaChat, model: ServedModel) -> TranslatedRequest | DirectAnswer:
    """Translate a chat. A request without messages only loads or unloads the model."""
    ignored = fields.ignored()
    if not fields.messages:
        return _preload(fields, model, lines.chat_part)
    toolbox = Toolbox(checked_tools(fields.tools))
    messages = normalise(fields.messages, ignored)
    task = requests.chat_request(fields, model, messages, toolbox, fields.tool_choice)
    return _translated(task, model, lines.chat_part, ignored, fields)


def generate(
    fields: requests.OllamaGenerate, model: ServedModel
) -> TranslatedRequest | DirectAnswer:
    """Translate a prompt, which is templated, raw, or has a suffix."""
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
        messages: list[dict[str, Any]] = []
        if fields.system:
            messages.append({"role": "system", "content": fields.system})
        messages.append({"role": "user", "content": fields.prompt, "images": fields.images})
        task = requests.chat_request(fields, model, normalise(messages))
    return _translated(task, model, lines.generated_part, ignored, fields)


def _preload(fields: requests.OllamaBody, model: ServedModel, part: lines.Part) -> DirectAnswer:
    """Return a function that answers a request that only loads or unloads its model."""
    keep_s = requests.keep_alive_s(fields.keep_alive)

    async def preload(server: Server) -> Response:
        if keep_s == 0:
            admins_only("unloading a model")
            await server.keep_alive.unload(model.worker)
            return JSONResponse(lines.loaded(model.name, part, "unload"))
        with server.serving(model, keep_s):
            await model.engine()
        return JSONResponse(lines.loaded(model.name, part, "load"))

    return preload


def _translated(
    task: ChatRequest | JobFactory,
    model: ServedModel,
    part: lines.Part,
    ignored: list[str],
    fields: requests.OllamaBody,
) -> TranslatedRequest:
    def body(reply: Reply, job: GenerationJob) -> dict[str, Any]:
        return lines.answer(reply, model.name, part)

    def writer(outbox: Outbox, job: GenerationJob, progress: PrefillProgress) -> ReplyWriter:
        return lines.JsonLines(outbox, model.name, part)

    keep_s = requests.keep_alive_s(fields.keep_alive)
    return TranslatedRequest(task, body, writer, tuple(ignored), keep_s=keep_s)


_ROUTES = (
    Route(
        "/api/chat",
        requests.OllamaChat,
        chat,
        _OLLAMA,
        "Answer a conversation; streams by default",
        ("message", "done"),
    ),
    Route(
        "/api/generate",
        requests.OllamaGenerate,
        generate,
        _OLLAMA,
        "Complete a prompt: with the chat template, raw, or as fill-in-the-middle before a suffix",
        ("response", "done"),
    ),
)


def routes(server: Server) -> Paths:
    paths = Paths("Ollama")
    mount(paths, server, *_ROUTES)
    _about_models(paths, server)
    _embedding(paths, server)
    _managing(paths, server)
    return paths


def _embedding(paths: Paths, server: Server) -> None:
    async def embed(fields: requests.OllamaEmbed) -> Any:
        started_s = time.monotonic()
        # An empty input gives no vectors, as in Ollama.
        inputs = each(fields.input) if fields.input else []
        name, rows, tokens = await vectors.embed(
            server,
            fields.model,
            inputs,
            truncate=fields.truncate is not False,
            keep_s=requests.keep_alive_s(fields.keep_alive),
        )
        cut = [vectors.cut(row, fields.dimensions) for row in rows]
        took_s = time.monotonic() - started_s
        return {
            "model": name,
            "embeddings": [vectors.numbers(row) for row in cut],
            "total_duration": int(took_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": tokens,
        }

    async def older(fields: requests.OllamaEmbeddings) -> Any:
        inputs = [fields.prompt] if fields.prompt else []
        keep_s = requests.keep_alive_s(fields.keep_alive)
        _, rows, _ = await vectors.embed(server, fields.model, inputs, truncate=True, keep_s=keep_s)
        return {"embedding": vectors.numbers(rows[0]) if rows else []}

    mount_non_streaming(
        paths,
        server,
        "/api/embed",
        requests.OllamaEmbed,
        embed,
        "Compute the embeddings of texts",
        (),
    )
    about = "Compute the embedding of one text (the former endpoint)"
    mount_non_streaming(
        paths, server, "/api/embeddings", requests.OllamaEmbeddings, older, about, ()
    )


def _managing(paths: Paths, server: Server) -> None:
    # Only one model is downloaded at a time.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pull")

    @paths.answers(
        "POST",
        "/api/pull",
        **body_of(requests.OllamaPull, "status", streams="application/x-ndjson"),
    )
    async def pull(request: Request) -> Response:
        """Download a model. Only if the server runs with --allow-pull."""
        admins_only("fetching a model")
        store = allowed(server.store)
        fields, ignored = read(requests.OllamaPull, await read_json(request, server.settings))
        name = fields.wanted()
        headers = answer_headers(ignored)
        if fields.stream is False:
            unread = Outbox()
            await cancel_on_disconnect(request.receive, _pull(thread, store, name, unread))
            return JSONResponse(
                {"status": "success"}, headers=headers
            )  # not read if the client left
        return StreamResponse(
            partial(_pull, thread, store, name),
            settings=server.settings,
            media_type=_OLLAMA.media_type,
            keepalive=_keepalive,
            frame_error=lines.frame_error,
            headers=headers,
        )

    @paths.answers("DELETE", "/api/delete", **body_of(requests.OllamaManaged))
    async def delete(request: Request) -> Response:
        """Remove a model from the server's disk. Only if the server runs with --allow-pull."""
        admins_only("removing a model")
        store = allowed(server.store)
        fields, ignored = read(requests.OllamaManaged, await read_json(request, server.settings))
        name = fields.wanted()
        with suppress(ModelNotFoundError):
            # A mapped file would keep its disk space, so the model is unloaded first. A model in
            # use is not removed.
            model = await server.models.find(name)
            if model.loaded:
                await model.worker.unload()
        await asyncio.to_thread(store.remove, name)
        return Response(headers=answer_headers(ignored))

    @paths.answers("POST", "/api/create", "/api/push", "/api/copy", about="")
    async def unsupported(request: Request) -> Response:
        raise UnsupportedError(
            "this server does not create or publish models over HTTP: manage local models on "
            "the command line with `localllm models`"
        )


def _about_models(paths: Paths, server: Server) -> None:
    @paths.answers("GET", "/", about="")
    async def root(request: Request) -> Response:
        """The text by which clients recognise Ollama."""
        return PlainTextResponse("Ollama is running")

    @paths.answers("GET", "/api/version")
    async def version(request: Request) -> dict[str, str]:
        """The release of Ollama whose API this server implements."""
        return {"version": VERSION}

    @paths.answers("GET", "/api/tags")
    async def tags(request: Request) -> dict[str, Any]:
        """The models that this server offers."""
        return lines.tags(server.models)

    @paths.answers("GET", "/api/ps")
    async def ps(request: Request) -> dict[str, Any]:
        """The loaded models."""
        loaded = [m for m in server.models.list() if m.loaded]
        return {"models": [lines.running(m, server.models.idle_s) for m in loaded]}

    async def show(fields: requests.OllamaManaged) -> Any:
        model = await server.models.find(fields.wanted())
        template = model.info.chat_template if model.info else None
        return await asyncio.to_thread(lines.show, model, template or "")

    mount_non_streaming(
        paths,
        server,
        "/api/show",
        requests.OllamaManaged,
        show,
        "One model's facts",
        ("capabilities",),
    )
