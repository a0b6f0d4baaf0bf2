"""Paths that generate text, and the steps of their requests: read the body, find the model,
translate, answer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.engine.messages import Generation
from localllm.errors import RequestError
from localllm.server.dialects.fields import RequestBody
from localllm.server.dialects.known import read
from localllm.server.dialects.openapi import body_of, form_of
from localllm.server.dialects.paths import Paths
from localllm.server.dialects.wire import EVENTS
from localllm.server.generation.job import GenerationJob
from localllm.server.http.accounts import caller
from localllm.server.http.asgi import answer_headers
from localllm.server.http.client_signs import SIGNS, signs_of
from localllm.server.http.form_body import read_form
from localllm.server.http.json_body import process_body, read_json
from localllm.server.http.streaming import KeptStream, StreamGoneError, respond_unless_disconnected
from localllm.server.models.router import ServedModel
from localllm.server.serving import Dialect, Server, TranslatedRequest

# The description of paths that count a prompt's tokens.
COUNT = "Count the tokens of the prompt"
Fields = TypeVar("Fields", bound=RequestBody)


# Answers a request without generating anything.
DirectAnswer: TypeAlias = Callable[[Server], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route(Generic[Fields]):
    """A path that generates text. It reads the body as `fields`, and `translate` makes a request
    for a model from it.

    In the OpenAPI document, `about` is the description and `keys` are the fields of a complete
    answer. `aliases` are additional paths, which the document does not list."""

    path: str
    fields: type[Fields]
    translate: Callable[[Fields, ServedModel], TranslatedRequest | DirectAnswer]
    dialect: Dialect
    about: str
    keys: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def mount(paths: Paths, server: Server, *routes: Route[Any]) -> None:
    """Serve each of `routes` under its path and aliases."""
    for route in routes:
        streams = route.dialect.media_type.partition(";")[0]
        described = body_of(route.fields, *route.keys, streams=streams)
        answer = partial(_answer, server, route)
        paths.answers("POST", route.path, *route.aliases, about=route.about, **described)(answer)


@dataclass(frozen=True, slots=True)
class Form(Generic[Fields]):
    """A path that generates text from a form with files. `translate` takes its texts as `fields`,
    and its files by name. `about` is the description in the OpenAPI document."""

    path: str
    fields: type[Fields]
    translate: Callable[[Fields, Mapping[str, bytes], ServedModel], TranslatedRequest]
    about: str


def mount_form(paths: Paths, server: Server, form: Form[Any]) -> None:
    """Serve `form` under its path, and without /v1. Its streams are OpenAI's."""
    described = form_of(form.fields, "file", "text", streams=EVENTS.media_type)

    @paths.answers("POST", form.path, form.path.removeprefix("/v1"), about=form.about, **described)
    async def answer_form(request: Request) -> Response:
        sent = await read_form(request, server.settings)
        fields, unknown = read(form.fields, sent.values)
        model = await server.models.find(fields.model)
        translated = form.translate(fields, sent.files, model)
        translated = replace(translated, ignored=tuple(unknown))
        if fields.stream:
            return await server.stream(model, translated, EVENTS)
        return await server.complete(request, model, translated)


def mount_non_streaming(
    paths: Paths,
    server: Server,
    path: str,
    kind: type[Fields],
    answer: Callable[[Fields], Awaitable[Any]],
    about: str,
    keys: tuple[str, ...],
    aliases: tuple[str, ...] = (),
) -> None:
    """Serve `path` without streaming. It reads a body as `kind` and sends the result of `answer` as
    JSON. The work is cancelled if the client disconnects."""

    @paths.answers("POST", path, *aliases, about=about, **body_of(kind, *keys))
    async def answer_non_streaming(request: Request) -> Response:
        body = await read_json(request, server.settings)
        fields, ignored = await process_body(partial(_read, kind, body))

        async def work() -> Response:
            return JSONResponse(await answer(fields), headers=answer_headers(ignored))

        return await respond_unless_disconnected(request, work())


def mount_prompt(
    paths: Paths,
    server: Server,
    path: str,
    route: Route[Any],
    about: str,
    body: Callable[[GenerationJob, int], Mapping[str, Any]],
    aliases: tuple[str, ...] = (),
) -> None:
    """Serve `path`, which takes the body of `route` but does not generate. It answers `body(job,
    tokens)`, with the number of the prompt's tokens."""
    keys = body(GenerationJob("", Generation()), 0)

    @paths.answers("POST", path, *aliases, about=about, **body_of(route.fields, *keys))
    async def prompt(request: Request) -> Response:
        sent = await read_json(request, server.settings)
        fields, unknown = await process_body(partial(read, route.fields, sent))
        model = await server.models.find(fields.model)
        translated = await process_body(partial(route.translate, fields, model))
        assert isinstance(translated, TranslatedRequest)
        job, tokens, ignored = await server.prompt(translated, model)
        return JSONResponse(body(job, tokens), headers=answer_headers([*unknown, *ignored]))


def _read(kind: type[Fields], body: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """Validate `body`. Return it with the names of ignored fields, which include `keep_alive`
    unless the caller is an admin."""
    fields, ignored = read(kind, body)
    if getattr(fields, "keep_alive", None) is not None and not caller().admin:
        ignored.append("keep_alive")
    return fields, ignored


async def _answer(server: Server, route: Route[Any], request: Request) -> Response:
    dialect = route.dialect
    SIGNS.set(signs_of(request.headers))
    body = await read_json(request, server.settings)
    key = None
    if dialect.media_type.startswith("text/event-stream"):
        key = await process_body(partial(_key, request, body))
    if key is not None:
        stream = server.kept_streams.find(key[0])
        if stream is not None:
            return _resumed(stream, key[1], request)
        if _last_event(request) >= 0:
            raise StreamGoneError("this server stores no stream with this Idempotency-Key")
    fields, unknown = await process_body(partial(_read, route.fields, body))
    model = await server.models.find(fields.model)
    translated = await process_body(partial(route.translate, fields, model))
    if not isinstance(translated, TranslatedRequest):
        return await translated(server)
    translated = replace(translated, ignored=(*unknown, *translated.ignored))
    streams = fields.stream if fields.stream is not None else dialect.streams
    if streams:
        return await server.stream(model, translated, dialect, key)
    return await server.complete(request, model, translated)


def _resumed(stream: KeptStream, digest: bytes, request: Request) -> Response:
    """Return the rest of a kept stream. Raises RequestError if it belongs to a different
    request."""
    if stream.digest != digest:
        raise RequestError(
            "this Idempotency-Key belongs to another request: send a new one",
            param="Idempotency-Key",
        )
    return stream.answer(_last_event(request))


def _last_event(request: Request) -> int:
    """Return the number in Last-Event-ID, or -1. Raises RequestError."""
    return event_number(request.headers.get("last-event-id"), "Last-Event-ID")


def _key(request: Request, body: Mapping[str, Any]) -> tuple[str, bytes] | None:
    """Return the Idempotency-Key under which the stream is kept, and a digest of the request, or
    None. Raises RequestError."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= 255:
        raise RequestError(
            "an Idempotency-Key must have 1 to 255 characters", param="Idempotency-Key"
        )
    content = json.dumps([request.url.path, body], sort_keys=True)
    return key, hashlib.sha256(content.encode()).digest()


def event_number(sent: str | None, where: str) -> int:
    """Return the number of the last event that the client has; -1 means that it has no event yet.
    Raises RequestError."""
    if re.fullmatch("[0-9]{0,9}", sent or "") is None:
        raise RequestError(f"{where} must be a whole number of at most 9 digits", param=where)
    return int(sent or -1)
