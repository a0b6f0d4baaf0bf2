"""Middleware that proxies a request whose model runs on an upstream server.

Local models take precedence. Requests for a full local model go to an upstream only if the settings
allow it. Body and answer are relayed unchanged; a header names the server that ran the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request

from localllm.model_names import Rule, find
from localllm.server.http.asgi import App, Receive, Scope, Send
from localllm.server.http.json_body import BODY, JsonBody, read_body, release_body
from localllm.server.http.settings import ServerSettings
from localllm.server.proxy.relay import ProxyRequest, UpstreamClient, accepted, until_disconnect
from localllm.server.proxy.upstreams import NAME_A_MODEL, RemoteModel, Upstreams
from localllm.server.proxy.usage_meter import meter_for

# Seconds for which the model lists of upstreams are cached.
_LIST_TTL_S = 30.0
_LIST_PATHS = ("/v1/models", "/models", "/api/tags")


class ProxyMiddleware:
    """Proxies requests for upstream models.

    `served` finds the local models with a name. `is_full` returns True if a model can't take one
    more request.
    """

    def __init__(
        self,
        app: App,
        upstreams: Upstreams,
        served: Callable[[str], Sequence[Any]],
        is_full: Callable[[Any], Awaitable[bool]],
        settings: ServerSettings,
    ) -> None:
        self.app = app
        self.upstreams = upstreams
        self._settings = settings
        self._served = served
        self._is_full = is_full
        self._http = upstreams.client = UpstreamClient()
        self._listed_s = float("-inf")
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or scope["path"] not in NAME_A_MODEL:
            if scope["path"].startswith(_LIST_PATHS):
                await self.refresh()
            await self.app(scope, receive, send)
            return
        body = await read_body(Request(scope, receive), self._settings)
        model = await self._remote_model(body[1].get("model"))
        if model is None:
            scope[BODY] = body
            await self.app(scope, receive, send)
            return
        outgoing = self._outgoing(scope, model, body)
        release_body()
        handed_on = self._http.relay(outgoing, scope, send)
        await until_disconnect(receive, handed_on, outgoing.meter)

    async def _remote_model(self, name: object) -> RemoteModel | None:
        """The upstream model to use for that name, or None if a local model answers."""
        if not isinstance(name, str) or not name:
            return None
        remote = self._remote(name)
        local = self._local(name)
        if local is not None:
            if remote is not None and remote.upstream.spill and await self._is_full(local):
                return remote
            return None
        unlisted = any(not upstream.models for upstream in self.upstreams.all)
        if remote is None and unlisted:
            await self.refresh()
            remote = self._remote(name)
        return remote

    def _local(self, name: str) -> Any:
        return find(name, {Rule.SERVED: self._served}).first

    def _remote(self, name: str) -> RemoteModel | None:
        return find(name, {Rule.UPSTREAM: self.upstreams.named}).first

    def _outgoing(self, scope: Scope, model: RemoteModel, body: JsonBody) -> ProxyRequest:
        raw, value = body
        if value["model"] != model.upstream_name:
            raw = json.dumps(
                {**value, "model": model.upstream_name}, ensure_ascii=False, separators=(",", ":")
            ).encode()
        upstream = model.upstream
        return ProxyRequest(
            upstream.name,
            upstream.address(scope["path"]),
            raw,
            upstream.key,
            upstream.silence_s,
            accepted(scope),
            meter=meter_for(scope["path"], value),
        )

    async def refresh(self) -> None:
        """Fetch outdated model lists. Concurrent callers wait for the same fetch."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._listed_s < _LIST_TTL_S:
                return
            self._listed_s = now
            listing = (
                self._http.models(u.name, u.base_url.rstrip("/") + "/models", u.key)
                for u in self.upstreams.all
            )
            for upstream, entries in zip(
                self.upstreams.all, await asyncio.gather(*listing), strict=True
            ):
                if entries:
                    self.upstreams.learn(upstream, entries)
