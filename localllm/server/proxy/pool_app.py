"""The front of a pool: a load balancer over several of our servers. It loads no model; a request is retried on another node
as long as no token of its answer has been sent."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from localllm.errors import BusyError, LocalLLMError, RequestError
from localllm.server.http.accounts import Account, Accounts, admins_only, caller, used_lines
from localllm.server.http.asgi import App, Receive, Scope, Send
from localllm.server.http.errors import internal, log_failure
from localllm.server.http.gate import SecurityGate, refuse
from localllm.server.http.json_body import read_body, send_json, send_text
from localllm.server.http.settings import ServerSettings
from localllm.server.proxy import relay
from localllm.server.proxy.affinity import NodePool, PoolNode, PrefixHashes, prefix_hashes
from localllm.server.proxy.client import ProxyRequest, UpstreamClient, UpstreamError, is_stream, upstream_error
from localllm.server.proxy.relay import frame_kind
from localllm.server.proxy.usage_meter import UsageMeter, meter_for

if TYPE_CHECKING:
    import aiohttp

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CHECK_S = 2.0
_MAX_TIMEOUTS = 5
# A node that answers so can't serve now; another one may.
_RETRY_STATUS = (502, 503)
# What is stored on one node and asked for by this id later.
_STORED_ID = re.compile(rb'"id"\s*:\s*"((?:resp|conv)_[A-Za-z0-9]+)"')
_STORED_ID_IN_PATH = re.compile(r"/((?:resp|conv)_[A-Za-z0-9]+)")
_HEAD_BYTES = 4096


def create_pool_app(pool: NodePool, settings: ServerSettings, key: str | None = None) -> tuple[App, PoolFront]:
    """The ASGI application in front of `pool`, behind our usual gate, and the front, whose `run` must be awaited. `key` is
    sent to the nodes."""
    front = PoolFront(pool, settings, key)
    return SecurityGate(front, settings, front.accounts), front


@dataclass
class _ClientStream:
    """The client's side of one request. `head`: the response headers have been sent."""

    send: Send
    head: bool = False

    async def write(self, answer: aiohttp.ClientResponse, outgoing: ProxyRequest, piece: bytes) -> None:
        """Send a piece of a stream, the headers before the first."""
        if not self.head:
            self.head = True
            headers = relay.relayed_headers(answer, outgoing.name)
            await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})


@dataclass(frozen=True, slots=True)
class _PooledRequest:
    """One request: its body, the hashes of its prompt, the id that binds it to a node (`affinity_key`), and its usage meter."""

    scope: Scope
    raw: bytes
    prompt: PrefixHashes
    affinity_key: bytes | None
    meter: UsageMeter


class _NodeRefusedError(Exception):
    """A node can't serve now. Its answer goes to the client if no other node can either."""

    def __init__(self, answer: aiohttp.ClientResponse, body: bytes) -> None:
        self.answer, self.body = answer, body


class PoolFront:
    """The load balancer; `run` does its health checks for as long as it is awaited."""

    def __init__(self, pool: NodePool, settings: ServerSettings, key: str | None) -> None:
        self.pool, self._settings, self._key = pool, settings, key
        self.accounts = Accounts(settings.keys, settings.api_key)
        self._http = UpstreamClient()
        self.retried = 0

    # --- health checks ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Poll every node's /health until cancelled, then close the connections."""
        try:
            while True:
                await self.check()
                await asyncio.sleep(_CHECK_S)
        finally:
            await self._http.close()

    async def check(self) -> None:
        """Poll every node's /health once."""
        await asyncio.gather(*(self._check(node) for node in self.pool.nodes))

    async def _check(self, node: PoolNode) -> None:
        try:
            status = await self._http.status(node.url + "/health", _CHECK_S)
        except TimeoutError:
            # A busy machine is not down.
            node.timeouts += 1
            node.up = node.up and node.timeouts < _MAX_TIMEOUTS
            return
        node.up = status == 200
        node.timeouts = 0 if status is not None else node.timeouts

    # --- requests ---------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            table = self._table(scope)
            if table is not None:
                await send_text(send, *table)
                return
            own = await self._own(scope, receive)
            if own is not None:
                await send_json(send, *own)
                return
            await self._forward(scope, receive, send)
        except LocalLLMError as e:
            await refuse(scope, send, e)
        except Exception as e:
            log_failure(e)
            error = internal(e)
            with contextlib.suppress(RuntimeError):  # the head has left
                await refuse(scope, send, error)

    def _table(self, scope: Scope) -> tuple[str, str] | None:
        """The front's own counters and their media type, if asked for: the nodes know no key's name."""
        if scope["method"] not in ("GET", "HEAD"):
            return None
        if scope["path"] == "/usage.csv":
            return self.accounts.table(caller()), "text/csv; charset=utf-8"
        if scope["path"] == "/metrics":
            return pool_metrics(self.pool, self.retried, self.accounts.seen_by(caller())), CONTENT_TYPE
        return None

    async def _own(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]] | None:
        """Status and body of what the front answers itself; None for what goes to a node."""
        path, method = scope["path"].rstrip("/"), scope["method"]
        if path in ("/health", "/v1/health"):
            up = any(node.takes for node in self.pool.nodes)
            return (200, {"status": "ok"}) if up else (503, {"status": "error", "error": {"code": 503}})
        if path == "/pool" and method == "GET":
            return 200, {"boxes": [node_facts(node) for node in self.pool.nodes], "retried": self.retried}
        if path in ("/pool/drain", "/pool/resume") and method == "POST":
            admins_only("draining a server")
            body = await read_body(Request(scope, receive), self._settings)
            node = self.pool.node(str(body.value.get("box", "")))
            if node is None:
                raise RequestError(f"`box` must be one of {', '.join(b.name for b in self.pool.nodes)}", param="box")
            node.draining = path == "/pool/drain"
            return 200, node_facts(node)
        return None

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw, prompt, affinity_key, meter = b"", PrefixHashes(), None, UsageMeter()
        if scope["method"] == "POST":
            body = await read_body(Request(scope, receive), self._settings)
            raw, prompt, meter = body.raw, prefix_hashes(body.value), meter_for(scope["path"], body.value)
            named = body.value.get("previous_response_id") or body.value.get("conversation")
            affinity_key = named.encode() if isinstance(named, str) else None
        if affinity_key is None and (stored_id := _STORED_ID_IN_PATH.search(scope["path"])) is not None:
            affinity_key = stored_id[1].encode()
        client = _ClientStream(send)
        request = _PooledRequest(scope, raw, prompt, affinity_key, meter)
        await relay.until_disconnect(receive, self._try_nodes(request, client), meter)

    async def _try_nodes(self, request: _PooledRequest, client: _ClientStream) -> None:
        tried: set[str] = set()
        refused: tuple[_NodeRefusedError, ProxyRequest] | None = None
        last: LocalLLMError = BusyError("no server of this pool is up", hint="GET /pool says how each of them is")
        while (node := self.pool.pick(request.prompt, frozenset(tried), request.affinity_key)) is not None:
            self.retried += bool(tried)
            tried.add(node.name)
            self.pool.affinity.record(request.prompt.hashes, node.name)
            node.active += 1
            outgoing = self._outgoing(request, node)
            try:
                await self._try_node(node, outgoing, client)
                node.served += 1
                return
            except UpstreamError as e:
                node.failed += 1
                last = e
                await self._check(node)
            except _NodeRefusedError as e:
                refused = (e, outgoing)
            except BusyError as e:
                last = e
            finally:
                node.active -= 1
        request.meter.fail()
        if refused is not None and not client.head:
            await relay.send_whole(refused[0].answer, refused[1], refused[0].body, client.send)
            return
        if not client.head:
            raise last
        frame = relay.error_frame("event-stream", last)
        await client.send({"type": "http.response.body", "body": frame, "more_body": False})

    def _outgoing(self, request: _PooledRequest, node: PoolNode) -> ProxyRequest:
        scope = request.scope
        query = scope.get("query_string", b"").decode("latin-1")
        # As it was sent: a path that was unquoted could hold a question mark of its own.
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        if not path.startswith("/"):
            raise RequestError("the path of a request begins with a slash")
        url = node.url + path + (f"?{query}" if query else "")
        accept = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"accept"), "*/*")
        return ProxyRequest(
            node.name, url, request.raw, self._key, accept=accept, method=scope["method"], meter=request.meter,
            silence_s=3600.0,
        )  # fmt: skip

    async def _try_node(self, node: PoolNode, outgoing: ProxyRequest, client: _ClientStream) -> None:
        """Send the request to one node. Raises UpstreamError or BusyError if another one may be tried."""
        answer = await self._http.open(outgoing)
        try:
            if answer.status in _RETRY_STATUS:
                raise _NodeRefusedError(answer, await relay.read_whole(answer, outgoing))
            if is_stream(answer) and answer.status == 200:
                await self._stream(node, answer, outgoing, client)
                return
            body = await relay.read_whole(answer, outgoing)
            self._note(node, body)
            if client.head:  # its stream began on another node
                frame = b"data: " + body.replace(b"\n", b" ") + b"\n\n"
                await client.send({"type": "http.response.body", "body": frame, "more_body": False})
                return
            await relay.send_whole(answer, outgoing, body, client.send)
        finally:
            answer.close()

    async def _stream(
        self, node: PoolNode, answer: aiohttp.ClientResponse, outgoing: ProxyRequest, client: _ClientStream
    ) -> None:
        """Relay a stream. Frames before the first token are held back: until then it can be retried on another node."""
        import aiohttp

        end = b"\n" if "ndjson" in answer.headers.get("content-type", "") else b"\n\n"
        rest, held, begun = b"", b"", False
        last = b""
        if client.head:
            await client.write(answer, outgoing, f": goes on at {node.name}\n".encode())
        try:
            async for piece in answer.content.iter_any():
                outgoing.meter.feed(piece)
                if begun:
                    await client.write(answer, outgoing, piece)
                    continue
                rest += piece
                while not begun and end in rest:
                    frame, rest = rest.split(end, 1)
                    kind = frame_kind(frame)
                    if kind == "retry":
                        raise BusyError(f"the server {node.name} could not begin")
                    if kind == "comment":
                        await client.write(answer, outgoing, frame + end)
                        continue
                    held += frame + end
                    begun = kind == "token"
                if begun:
                    self._note(node, held)
                    await client.write(answer, outgoing, held + rest)
        except (aiohttp.ClientError, TimeoutError) as e:
            if not begun:
                raise upstream_error(outgoing, e) from e
            last = relay.error_frame(answer.headers.get("content-type", ""), upstream_error(outgoing, e))
        if not begun:
            await client.write(answer, outgoing, held + rest)
        await client.send({"type": "http.response.body", "body": last, "more_body": False})

    def _note(self, node: PoolNode, begins: bytes) -> None:
        """Remember that a stored response or conversation lies on `node`."""
        found = _STORED_ID.search(begins[:_HEAD_BYTES])
        if found is not None:
            self.pool.affinity.record([found[1]], node.name)


def node_facts(node: PoolNode) -> dict[str, Any]:
    """One entry of GET /pool."""
    return {
        "name": node.name, "up": node.up, "draining": node.draining, "active": node.active, "served": node.served,
        "failed": node.failed,
    }  # fmt: skip


def pool_metrics(pool: NodePool, retried: int, accounts: Sequence[Account]) -> str:
    """The front's counters in Prometheus' text format, and what `accounts` have used. What the servers count themselves
    is read from their own /metrics."""
    lines = ["# TYPE localllm_pool_retried_total counter", f"localllm_pool_retried_total {retried}"]
    for name, kind in (
        ("up", "gauge"),
        ("draining", "gauge"),
        ("active", "gauge"),
        ("served", "counter"),
        ("failed", "counter"),
    ):
        metric = f"localllm_pool_{name}{'_total' if kind == 'counter' else ''}"
        lines.append(f"# TYPE {metric} {kind}")
        lines += [f'{metric}{{box="{node.name}"}} {int(getattr(node, name))}' for node in pool.nodes]
    return "\n".join([*lines, *used_lines(accounts)]) + "\n"
