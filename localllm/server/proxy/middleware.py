"""The layer before the routes that hands a request on when its model runs elsewhere: local models first, and a spill only
where the settings say so. What it hands on is what the client sent, and what it answers says where it ran."""

from __future__ import annotations

import asyncio
import json
from typing import Protocol

from starlette.requests import Request

from localllm.errors import LocalLLMError
from localllm.server.http.asgi import App, Receive, Scope, Send
from localllm.server.http.errors import headers_of
from localllm.server.http.json_body import Body, keep_body, read_body, send_json
from localllm.server.http.settings import ServerSettings
from localllm.server.http.streaming import OWN_SEND
from localllm.server.proxy import relay
from localllm.server.proxy.client import Errand, Reaching, is_stream
from localllm.server.proxy.upstreams import RemoteModel, Upstream, Upstreams, names_a_model
from localllm.server.proxy.usage_meter import meter_of

# The list of a server whose models are not named in the settings is asked for again after so long.
_LIST_HOLDS_S = 30.0
_LISTS = ("/v1/models", "/models", "/api/tags")


class Locals(Protocol):
    """What must be known of the models of this server."""

    async def has(self, name: str) -> bool:
        """Is there one of that name?"""
        ...

    async def full(self, name: str) -> bool:
        """Has it no room for one more request now?"""
        ...


class HandingOn:
    """ASGI middleware; see the module docstring."""

    def __init__(self, app: App, upstreams: Upstreams, here: Locals, settings: ServerSettings) -> None:
        self.app, self.upstreams, self._here, self._settings = app, upstreams, here, settings
        self._http = Reaching()
        upstreams.at_close(self._http.close)
        self._listed_s = float("-inf")
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand one request on, or pass it to the routes."""
        if scope["type"] != "http" or scope["method"] != "POST" or not names_a_model(scope["path"]):
            if scope["type"] == "http" and scope["path"].startswith(_LISTS):
                await self.refresh()
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            body = await read_body(request, self._settings)
            model = await self._elsewhere(body)
            if model is None:
                keep_body(scope, body)
                await self.app(scope, receive, send)
                return
            errand = self._errand(scope, model, body)
            work = asyncio.create_task(self._relay(errand, scope, send))
            await relay.while_there(receive, work, errand.meter)
        except LocalLLMError as e:
            await send_json(send, e.http_status, e.to_openai(), headers_of(e))

    async def _relay(self, errand: Errand, scope: Scope, send: Send) -> None:
        answer = await self._http.open(errand)
        try:
            if is_stream(answer):
                await relay.pass_stream(answer, errand, send, own_send=scope.get(OWN_SEND))
            else:
                await relay.pass_whole(answer, errand, send)
        finally:
            answer.close()

    async def _elsewhere(self, body: Body) -> RemoteModel | None:
        """The model that answers, where that is not one of ours."""
        name = body.value.get("model")
        if not isinstance(name, str) or not name:
            return None
        model = self.upstreams.find(name)
        if model is None and self.upstreams.unlisted and not await self._here.has(name):
            await self.refresh()
            model = self.upstreams.find(name)
        if model is None or not await self._here.has(name):
            return model
        return model if model.upstream.spill and await self._here.full(name) else None

    def _errand(self, scope: Scope, model: RemoteModel, body: Body) -> Errand:
        name = body.value["model"]
        raw = body.raw
        if name != model.theirs:
            raw = json.dumps({**body.value, "model": model.theirs}, ensure_ascii=False, separators=(",", ":")).encode()
        accept = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"accept"), "*/*")
        upstream = model.upstream
        return Errand(
            upstream.name,
            upstream.address(scope["path"]),
            raw,
            upstream.key,
            upstream.silence_s,
            accept,
            meter=meter_of(scope["path"], body.value),
        )

    async def refresh(self) -> None:
        """Ask the servers for their lists, where that is due; who asks meanwhile waits for the same lists."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._listed_s < _LIST_HOLDS_S:
                return
            self._listed_s = now
            await asyncio.gather(*(self._learn(upstream) for upstream in self.upstreams.all))

    async def _learn(self, upstream: Upstream) -> None:
        url = upstream.base_url.rstrip("/") + "/models"
        entries = await self._http.models(url, upstream.key)
        if entries:
            self.upstreams.learn(upstream, entries)
