"""The front of a pool: passes each request to one of several localllm servers, and loads no model.

The turns of a conversation go to one server, which has their cache. The server is chosen by hashing
the beginning of the conversation (rendezvous hashing). If that server is crowded or fails, the next
choice is the server of the system prompt and tools, which many conversations have in common. The
chosen server copies the KV of that part from there (`kv_holders`), so a pool reads it once.

Subagents of one session have different conversations, but the same system prompt. If the client sends
the id of its session, all requests with one system prompt go to one server.

There is no state, so a restarted or a second front makes the same choice. Other requests go to the
server with the fewest running requests. If a server can't serve a request, the next one gets it,
unless part of an answer was already sent.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from localllm.conversation.prefix_reuse import without_billing
from localllm.errors import BusyError, RequestError
from localllm.server.http.accounts import Accounts, caller, usage_metrics
from localllm.server.http.asgi import Receive, Scope, Send
from localllm.server.http.client_signs import signs_of
from localllm.server.http.gate import SecurityGate
from localllm.server.http.json_body import process_body, read_body, release_body
from localllm.server.http.kv_servers import MAX_SERVERS
from localllm.server.http.prometheus import CONTENT_TYPE, labels, metric
from localllm.server.http.settings import ServerSettings
from localllm.server.proxy.relay import (
    ProxyRequest,
    UpstreamClient,
    UpstreamError,
    accepted,
    until_disconnect,
)
from localllm.server.proxy.usage_meter import UsageMeter, meter_for

# For this many seconds after a failure, a server is tried last.
_FAILED_S = 5.0
# A conversation leaves its server if that has this many more requests than the least loaded one.
_MAX_EXTRA_REQUESTS = 8
# A server with one of these statuses can't serve now, or the stored object is on another server.
_REFUSED = (502, 503)
_NOT_FOUND = 404
_STORED_PATH = re.compile(r"/(v1/)?responses/resp_")
# The length of a prompt's beginning, in characters or token ids.
_HEAD_LENGTH = 512
_SYSTEM_ROLES = ("system", "developer")


@dataclass
class PoolNode:
    """One server of the pool, with its number of `active` requests and the time of its last
    failure."""

    name: str
    url: str
    active: int = 0
    failed_s: float = float("-inf")


def conversation_key(body: Mapping[str, Any]) -> bytes | None:
    """The common part of a conversation's turns, in any dialect, or None if there is no such
    prefix.

    It consists of the model and all messages up to the first one of the user.
    """
    sent = body.get("messages") or body.get("prompt") or body.get("input")
    if not isinstance(sent, (str, list)):
        return None
    head = sent[:_HEAD_LENGTH]
    if isinstance(sent, list) and isinstance(sent[0], dict):
        roles = (message.get("role") for message in sent)
        other_messages = (i for i, role in enumerate(roles) if role not in _SYSTEM_ROLES)
        head = sent[: next(other_messages, 0) + 1]
    elif isinstance(sent, list) and "prompt" not in body:
        return None  # texts for embeddings
    return _key(body.get("model"), head)


def system_key(body: Mapping[str, Any]) -> bytes | None:
    """The part that different conversations have in common, in any dialect: model, system prompt
    and tools. None without both."""
    system = _system_prompt(body)
    tools = body.get("tools")
    if not any(system) and not tools:
        return None
    return _key(body.get("model"), *system, tools)


def session_key(session: str, body: Mapping[str, Any]) -> bytes | None:
    """The part that a session's conversations have in common: its id, model and system prompt.

    Tools are not part of it, because clients add some during a conversation. None without an id or
    a system prompt.
    """
    system = _system_prompt(body)
    if not session or not any(system):
        return None
    return _key(session, body.get("model"), *system)


def _keys(session: str, body: Mapping[str, Any]) -> tuple[bytes | None, bytes | None]:
    """Return the key of a request's place, and that of its system part."""
    return session_key(session, body) or conversation_key(body), system_key(body)


def _system_prompt(body: Mapping[str, Any]) -> list[Any]:
    messages = body.get("messages") or body.get("input")
    head = []
    if isinstance(messages, list):
        for message in messages:
            if not isinstance(message, dict) or message.get("role") not in _SYSTEM_ROLES:
                break
            head.append(message)
    return [body.get("system"), body.get("instructions"), head]


def _key(*parts: Any) -> bytes:
    return json.dumps([_without_changing_marks(part) for part in parts]).encode()


def _without_changing_marks(part: Any) -> Any:
    """Return `part` without marks that clients move or change with each turn."""
    if isinstance(part, str):
        return without_billing(part)
    if isinstance(part, list):
        return [_without_changing_marks(item) for item in part]
    if isinstance(part, dict):
        return {
            name: _without_changing_marks(item)
            for name, item in part.items()
            if name != "cache_control"
        }
    return part


def by_preference(
    nodes: Sequence[PoolNode], key: bytes | None, now_s: float, system: bytes | None = None
) -> list[PoolNode]:
    """The order in which `nodes` are tried for a conversation with that `key`.

    The second choice is the server of the conversation's `system` part, because it is the most
    likely to have that part in its cache.
    """
    min_active = min(node.active for node in nodes)
    chosen: list[PoolNode] = []
    for part in (key, system):
        if part is not None:
            chosen.append(min(nodes, key=partial(_weight, part)))

    def rank(node: PoolNode) -> tuple[bool, int, int, bytes]:
        failed = now_s - node.failed_s < _FAILED_S
        if key is None:
            return failed, node.active, 0, b""
        crowding = 0
        if node.active > min_active + _MAX_EXTRA_REQUESTS:
            crowding = node.active
        place = len(chosen)
        if node in chosen:
            place = chosen.index(node)
        return failed, crowding, place, _weight(key, node)

    return sorted(nodes, key=rank)


def kv_holders(
    nodes: Sequence[PoolNode], system: bytes | None, asking: PoolNode, now_s: float
) -> list[str]:
    """Names (host:port) of the servers that `asking` asks for the KV of the `system` part.

    All servers have the same order, and each asks only those before it. So the first one reads the
    part, and the next one does if the first one fails.
    """
    if system is None:
        return []
    working = [node for node in nodes if now_s - node.failed_s >= _FAILED_S]
    order = sorted(working, key=partial(_weight, system))
    earlier_nodes = takewhile(lambda node: node is not asking, order)
    return [urlsplit(node.url).netloc for node in earlier_nodes][:MAX_SERVERS]


def _weight(key: bytes, node: PoolNode) -> bytes:
    """The weight of a server for a key (rendezvous hashing). The lowest one is chosen."""
    return blake2b(key + node.name.encode()).digest()


class PoolFront:
    """Relays requests to `nodes`.

    It answers `/metrics` and `/usage.csv` itself, because the nodes do not know the names of keys.
    `app` is the ASGI application, including the usual gate. Close `http` after it. `key` is sent to
    the nodes.
    """

    def __init__(
        self, nodes: Sequence[PoolNode], settings: ServerSettings, key: str | None = None
    ) -> None:
        self.nodes = nodes
        self._settings = settings
        self._key = key
        self._accounts = Accounts(settings.keys, settings.api_key)
        self.app = SecurityGate(self, settings, self._accounts)
        self.http = UpstreamClient()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET" and scope["path"] == "/usage.csv":
            table = Response(self._accounts.table(caller()), media_type="text/csv")
            await table(scope, receive, send)
        elif scope["method"] == "GET" and scope["path"] == "/metrics":
            await Response(self._metrics(), media_type=CONTENT_TYPE)(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    def _metrics(self) -> str:
        by_node = [(labels(box=node.name), node.active) for node in self.nodes]
        active = metric("localllm_pool_active", "gauge", by_node)
        used = usage_metrics(self._accounts.visible_to(caller()))
        return "\n".join([*active, *used]) + "\n"

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = b""
        key = system = None
        meter = UsageMeter()
        stored = _STORED_PATH.match(scope["path"]) is not None
        if scope["method"] == "POST":
            raw, body = await read_body(Request(scope, receive), self._settings)
            session = signs_of(Headers(scope=scope)).session
            key, system = await process_body(partial(_keys, session, body))
            meter = meter_for(scope["path"], body)
            release_body()
            stored = stored or bool(body.get("previous_response_id"))
        refused: tuple[int, ...] = _REFUSED
        if stored:
            refused = (*_REFUSED, _NOT_FOUND)
        nodes = by_preference(self.nodes, key, time.monotonic(), system)

        async def ask() -> bool:
            for node in nodes:
                holders = kv_holders(self.nodes, system, node, time.monotonic())
                outgoing = replace(self._outgoing(scope, node, raw, meter), kv_servers=holders)
                node.active += 1
                try:
                    passed = () if node is nodes[-1] else refused
                    if await self.http.relay(outgoing, scope, send, passed):
                        return True
                except UpstreamError:
                    node.failed_s = time.monotonic()
                finally:
                    node.active -= 1
            raise BusyError("no server of this pool answered", hint="check that the servers run")

        await until_disconnect(receive, ask(), meter)

    def _outgoing(
        self, scope: Scope, node: PoolNode, raw: bytes, meter: UsageMeter
    ) -> ProxyRequest:
        query = scope.get("query_string", b"").decode("latin-1")
        # The path as sent: an unquoted path could contain a question mark.
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        if not path.startswith("/"):
            raise RequestError("the path of a request must begin with a slash")
        url = node.url + path
        if query:
            url += f"?{query}"
        return ProxyRequest(
            node.name,
            url,
            raw,
            self._key,
            accept=accepted(scope),
            method=scope["method"],
            meter=meter,
            silence_s=3600.0,
        )
