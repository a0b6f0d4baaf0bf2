"""The route of POST /v1/kv, and the checks of a request for KV."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from localllm.addresses import is_loopback
from localllm.engine.adapters import adapted_weights, set_name
from localllm.engine.messages import MAX_ADAPTERS, Generation, Sampling
from localllm.engine.transfer.frames import (
    DONE,
    HEAD,
    MAX_PADS_BYTES,
    MEDIA_TYPE,
    json_frame,
    pads_frame,
)
from localllm.engine.worker.client import EngineClient
from localllm.errors import AuthError, RequestError, UnsupportedError
from localllm.server.dialects.fields import RequestBody, TokenId
from localllm.server.dialects.known import BodyPart, read
from localllm.server.dialects.paths import Paths
from localllm.server.http.accounts import caller, salt_of
from localllm.server.http.errors import BodyTooLargeError
from localllm.server.http.json_body import read_json
from localllm.server.http.settings import ServerSettings
from localllm.server.http.streaming import respond_unless_disconnected
from localllm.server.kv_transfer.sending import KvResponse, KvSending
from localllm.server.models.served import ServedModel
from localllm.server.serving import Server

_MAX_SALT_CHARS = 1024


class KvDiffersError(
    RequestError,
    code="kv_differs",
    http_status=409,
    default_hint="both servers need the same model file, adapters and KV type, and the same engine",
):
    """The KV of the two servers can't be exchanged."""


class KvAdapter(BodyPart):
    """An adapter that computes the KV, by the hash of its contents."""

    digest: str = Field(max_length=64)
    scale: float


class KvFields(RequestBody):
    """POST /v1/kv. `tokens` empty: only measure the link, with `pads` bytes. `identity` is that of
    the KV which the `adapters` compute."""

    tokens: list[TokenId] = Field(max_length=2**22)
    identity: dict[str, str] = Field(max_length=16)
    start: int = Field(0, ge=0)
    salt: str = Field("", max_length=_MAX_SALT_CHARS)
    adapters: list[KvAdapter] = Field(default_factory=list, max_length=MAX_ADAPTERS)
    pads: int = Field(0, ge=0, le=MAX_PADS_BYTES)


def routes(server: Server) -> Paths:
    """Return the paths of KV transfers. The OpenAPI document does not list them."""
    paths = Paths("kv")

    @paths.answers("POST", "/v1/kv", about="")
    async def send_kv(request: Request) -> Response:
        check_caller(request, server.settings)
        fields, _ = read(KvFields, await read_json(request, server.settings))
        model = await _model(server, fields)
        with server.serving(model):
            work = _answer(fields, model, server.settings.idle_timeout_s)
            return await respond_unless_disconnected(request, work)

    return paths


def check_caller(request: Request, settings: ServerSettings) -> None:
    """Raise AuthError unless the caller's key may read KV, over a connection that may carry it."""
    if not caller().kv:
        raise AuthError(
            "this key may not read KV",
            hint="give the other server a key of its own, with `kv = true` in config.toml",
        )
    peer = request.client.host if request.client is not None else ""
    near = settings.unix_socket is not None or is_loopback(peer)
    if not near and settings.tls is None and not settings.allow_plain:
        raise AuthError(
            "KV is not sent unencrypted to another machine",
            hint="serve with --tls-cert, use a tunnel, or allow it with --allow-plain",
        )


async def _model(server: Server, fields: KvFields) -> ServedModel:
    """The loaded model with these weights, else the one of that name. Raises ModelNotFoundError."""
    name = _set_name(fields)
    for model in server.models.list():
        if model.info is None:
            continue
        if adapted_weights(model.info.fingerprint, name) == fields.identity.get("weights"):
            return model
    return await server.models.find(fields.model)


def _set_name(fields: KvFields) -> str:
    return set_name((adapter.digest, adapter.scale) for adapter in fields.adapters)


def _own_identity(engine: EngineClient, fields: KvFields) -> dict[str, str]:
    """The identity of the KV that `engine` computes with the request's adapters; {} if it has no KV
    for others."""
    if not engine.kv_identity:
        return {}
    weights = adapted_weights(engine.kv_identity["weights"], _set_name(fields))
    return {**engine.kv_identity, "weights": weights}


def _adapters(engine: EngineClient, fields: KvFields) -> tuple[tuple[int, float], ...]:
    """The request's adapters as `Generation.adapters`. Raises KvDiffersError if one is not loaded."""
    numbers = {digest: number for number, (digest, _) in enumerate(engine.info.adapters)}
    if any(adapter.digest not in numbers for adapter in fields.adapters):
        raise KvDiffersError("the adapters of the KV are not loaded here")
    return tuple((numbers[adapter.digest], adapter.scale) for adapter in fields.adapters)


async def _answer(fields: KvFields, model: ServedModel, silence_s: float) -> Response:
    engine = await model.engine()
    own = _own_identity(engine, fields)
    if not own:
        raise UnsupportedError(f"{model.name} has no KV that another server can use")
    different = [part for part in own if own[part] != fields.identity.get(part)]
    if different:
        raise KvDiffersError(f"{model.name} has other KV here: {', '.join(different)} differ")
    if len(fields.tokens) >= engine.info.n_ctx:
        raise BodyTooLargeError(
            f"{len(fields.tokens)} tokens do not fit the served context of {engine.info.n_ctx}"
        )
    if not fields.tokens:
        return await _probe(fields, model)
    if fields.start >= len(fields.tokens) - 1:
        raise RequestError("start must be below the last token but one", param="start")
    salt = salt_of(fields.salt)
    if caller().admin:
        # The servers of a pool have the same keys. So a salt means the same on all of them, and the
        # pool's key may use the KV that this server has read for any of its users.
        salt = fields.salt
    generation = Generation(
        Sampling(temperature=0.0),
        max_tokens=0,
        tenant=caller().name,
        salt=salt,
        adapters=_adapters(engine, fields),
    )
    sending = KvSending(engine, generation, fields.tokens, fields.start)
    try:
        await sending.begin()
    except BaseException:
        await sending.close(caller())
        raise
    return KvResponse(sending, model, caller(), silence_s)


async def _probe(fields: KvFields, model: ServedModel) -> Response:
    """The speed of this server, and bytes to measure the link."""
    snapshot: dict[str, Any] = await model.worker.snapshot()
    head = {
        "prefill_tok_s": snapshot.get("prefill_tok_s", 0.0),
        "most_tokens": (model.served_n_ctx or 1) - 1,
    }
    body = json_frame(HEAD, head) + pads_frame(fields.pads) + json_frame(DONE, {})
    return Response(body, media_type=MEDIA_TYPE)
