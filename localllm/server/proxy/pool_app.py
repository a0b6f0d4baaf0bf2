"""The front of a pool: every request goes to one of several servers of ours, and is tried at another one as long as no
token of its answer has left. It loads no model itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from localllm.errors import BusyError, LocalLLMError, RequestError
from localllm.server.http.accounts import Account, Accounts, caller, used_lines
from localllm.server.http.asgi import App, Receive, Scope, Send
from localllm.server.http.errors import headers_of, internal, log_failure
from localllm.server.http.gate import SecurityGate
from localllm.server.http.json_body import read_body, send_json, send_text
from localllm.server.http.settings import ServerSettings
from localllm.server.proxy import relay
from localllm.server.proxy.affinity import Box, Chain, Pool, chain_of
from localllm.server.proxy.client import Errand, Reaching, UpstreamError, broken, is_stream
from localllm.server.proxy.relay import kind_of
from localllm.server.proxy.usage_meter import Meter, meter_of

if TYPE_CHECKING:
    import aiohttp

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CHECK_S = 2.0
_MOST_UNHEARD = 5
# What a server says that can't now: another one may.
_TRY_ELSEWHERE = (502, 503)
# What is kept on one server, and asked for by this name later.
_KEPT = re.compile(rb'"id"\s*:\s*"((?:resp|conv)_[A-Za-z0-9]+)"')
_KEPT_IN_PATH = re.compile(r"/((?:resp|conv)_[A-Za-z0-9]+)")
_HEAD_BYTES = 4096


def create_pool_app(pool: Pool, settings: ServerSettings, key: str | None = None) -> tuple[App, PoolFront]:
    """The ASGI application in front of `pool`, behind the same gate as any server of ours; and its front, to be run.
    `key`: what the servers want."""
    front = PoolFront(pool, settings, key)
    return SecurityGate(front, settings, front.accounts), front


@dataclass
class _Talk:
    """What the client has been sent: `head` once the status has left."""

    send: Send
    head: bool = False
    held: list[bytes] = field(default_factory=list)

    async def say(self, answer: aiohttp.ClientResponse, errand: Errand, piece: bytes) -> None:
        """A piece of a stream; its head before the first."""
        if not self.head:
            self.head = True
            headers = relay.passed_headers(answer, errand.name)
            await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request: its body and the chain of it, what binds it to a server (`mark`), and who counts it."""

    scope: Scope
    raw: bytes
    chain: Chain
    mark: bytes | None
    meter: Meter | None


class _RefusedThereError(Exception):
    """A server can't now. Its answer is the client's where no other one can either."""

    def __init__(self, answer: aiohttp.ClientResponse, body: bytes) -> None:
        self.answer, self.body = answer, body


class PoolFront:
    """See the module docstring. `run` watches over the servers for as long as it is awaited."""

    def __init__(self, pool: Pool, settings: ServerSettings, key: str | None) -> None:
        self.pool, self._settings, self._key = pool, settings, key
        self.accounts = Accounts(settings.keys, settings.api_key)
        self._http = Reaching()
        self.retried = 0

    # --- the servers ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask every server now and then whether it is there, until cancelled; then leave them."""
        try:
            while True:
                await self.check()
                await asyncio.sleep(_CHECK_S)
        finally:
            await self._http.close()

    async def check(self) -> None:
        """Ask every server whether it is there."""
        await asyncio.gather(*(self._check(box) for box in self.pool.boxes))

    async def _check(self, box: Box) -> None:
        try:
            status = await self._http.status(box.url + "/health", _CHECK_S)
        except TimeoutError:
            # A machine that is very busy is not gone.
            box.unheard += 1
            box.up = box.up and box.unheard < _MOST_UNHEARD
            return
        box.up = status == 200
        box.unheard = 0 if status is not None else box.unheard

    # --- requests ---------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
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
            await self._pass_on(scope, receive, send)
        except LocalLLMError as e:
            await send_json(send, e.http_status, e.to_openai(), headers_of(e))
        except Exception as e:
            log_failure(e)
            error = internal(e)
            with contextlib.suppress(RuntimeError):  # the head has left
                await send_json(send, error.http_status, error.to_openai(), headers_of(error))

    def _table(self, scope: Scope) -> tuple[str, str] | None:
        """The front's own counts and their type, where a request asks for those: the servers know nobody's name."""
        if scope["method"] not in ("GET", "HEAD"):
            return None
        if scope["path"] == "/usage.csv":
            return self.accounts.table(caller()), "text/csv; charset=utf-8"
        if scope["path"] == "/metrics":
            return counters(self.pool, self.retried, self.accounts.seen_by(caller())), CONTENT_TYPE
        return None

    async def _own(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]] | None:
        """Status and body of what the front answers itself."""
        path, method = scope["path"].rstrip("/"), scope["method"]
        if path in ("/health", "/v1/health"):
            up = any(box.takes for box in self.pool.boxes)
            return (200, {"status": "ok"}) if up else (503, {"status": "error", "error": {"code": 503}})
        if path == "/pool" and method == "GET":
            return 200, {"boxes": [told(box) for box in self.pool.boxes], "retried": self.retried}
        if path in ("/pool/drain", "/pool/resume") and method == "POST":
            if caller().name:
                raise RequestError("only the server's owner may do that", hint="use the key without a name")
            body = await read_body(Request(scope, receive), self._settings)
            box = self.pool.box(str(body.value.get("box", "")))
            if box is None:
                raise RequestError(f"`box` must be one of {', '.join(b.name for b in self.pool.boxes)}", param="box")
            box.draining = path == "/pool/drain"
            return 200, told(box)
        return None

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw, chain, mark, meter = b"", Chain(), None, None
        if scope["method"] == "POST":
            body = await read_body(Request(scope, receive), self._settings)
            raw, chain, meter = body.raw, chain_of(body.value), meter_of(scope["path"], body.value)
            named = body.value.get("previous_response_id") or body.value.get("conversation")
            mark = named.encode() if isinstance(named, str) else None
        if mark is None and (kept := _KEPT_IN_PATH.search(scope["path"])) is not None:
            mark = kept[1].encode()
        talk = _Talk(send)
        asked = _Asked(scope, raw, chain, mark, meter)
        work = asyncio.create_task(self._somewhere(asked, talk))
        await relay.while_there(receive, work, meter)

    async def _somewhere(self, asked: _Asked, talk: _Talk) -> None:
        tried: set[str] = set()
        refused: tuple[_RefusedThereError, Errand] | None = None
        last: LocalLLMError = BusyError("no server of this pool is up", hint="GET /pool says how each of them is")
        while (box := self.pool.pick(asked.chain, frozenset(tried), asked.mark)) is not None:
            self.retried += bool(tried)
            tried.add(box.name)
            self.pool.trails.leave(asked.chain.hashes, box.name)
            box.active += 1
            errand = self._errand(asked, box)
            try:
                await self._at(box, errand, talk)
                box.served += 1
                return
            except UpstreamError as e:
                box.failed += 1
                last = e
                await self._check(box)
            except _RefusedThereError as e:
                refused = (e, errand)
            except BusyError as e:
                last = e
            finally:
                box.active -= 1
        if asked.meter is not None:
            asked.meter.failed()
        if refused is not None and not talk.head:
            await relay.send_whole(refused[0].answer, refused[1], refused[0].body, talk.send)
            return
        if not talk.head:
            raise last
        frame = relay.error_frame_as("event-stream", last)
        await talk.send({"type": "http.response.body", "body": frame, "more_body": False})

    def _errand(self, asked: _Asked, box: Box) -> Errand:
        scope = asked.scope
        query = scope.get("query_string", b"").decode("latin-1")
        # As it was sent: a path that was unquoted could hold a question mark of its own.
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        if not path.startswith("/"):
            raise RequestError("the path of a request begins with a slash")
        url = box.url + path + (f"?{query}" if query else "")
        accept = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"accept"), "*/*")
        return Errand(
            box.name, url, asked.raw, self._key, accept=accept, method=scope["method"], meter=asked.meter,
            silence_s=3600.0,
        )  # fmt: skip

    async def _at(self, box: Box, errand: Errand, talk: _Talk) -> None:
        """Try one server. Raises UpstreamError or BusyError where another one may be tried."""
        answer = await self._http.open(errand)
        try:
            if answer.status in _TRY_ELSEWHERE:
                raise _RefusedThereError(answer, await relay.whole(answer, errand))
            if is_stream(answer) and answer.status == 200:
                await self._stream(box, answer, errand, talk)
                return
            body = await relay.whole(answer, errand)
            self._note(box, body)
            if talk.head:  # it began at another server, and this one refuses it
                frame = b"data: " + body.replace(b"\n", b" ") + b"\n\n"
                await talk.send({"type": "http.response.body", "body": frame, "more_body": False})
                return
            await relay.send_whole(answer, errand, body, talk.send)
        finally:
            answer.close()

    async def _stream(self, box: Box, answer: aiohttp.ClientResponse, errand: Errand, talk: _Talk) -> None:
        """What comes before the first token is kept back until that is there: till then it can be had elsewhere."""
        import aiohttp

        end = b"\n" if "ndjson" in answer.headers.get("content-type", "") else b"\n\n"
        rest, held, begun = b"", b"", False
        last = b""
        if talk.head:
            await talk.say(answer, errand, f": goes on at {box.name}\n\n".encode())
        try:
            async for piece in answer.content.iter_any():
                if errand.meter is not None:
                    errand.meter.hear(piece)
                if begun:
                    await talk.say(answer, errand, piece)
                    continue
                rest += piece
                while not begun and end in rest:
                    frame, rest = rest.split(end, 1)
                    kind = kind_of(frame)
                    if kind == "retry":
                        raise BusyError(f"the server {box.name} could not begin")
                    if kind == "comment":
                        await talk.say(answer, errand, frame + end)
                        continue
                    held += frame + end
                    begun = kind == "token"
                if begun:
                    self._note(box, held)
                    await talk.say(answer, errand, held + rest)
        except (aiohttp.ClientError, TimeoutError) as e:
            if not begun:
                raise broken(errand, e) from e
            last = relay.error_frame(answer, broken(errand, e))
        if not begun:
            await talk.say(answer, errand, held + rest)
        await talk.send({"type": "http.response.body", "body": last, "more_body": False})

    def _note(self, box: Box, begins: bytes) -> None:
        """Remember what is kept there: a stored response, a conversation."""
        found = _KEPT.search(begins[:_HEAD_BYTES])
        if found is not None:
            self.pool.trails.leave([found[1]], box.name)


def told(box: Box) -> dict[str, Any]:
    """A server of the pool, as GET /pool says it."""
    return {
        "name": box.name, "up": box.up, "draining": box.draining, "active": box.active, "served": box.served,
        "failed": box.failed,
    }  # fmt: skip


def counters(pool: Pool, retried: int, accounts: Sequence[Account]) -> str:
    """The front's counters in Prometheus' text format, and what `accounts` have used. What the servers count themselves
    is asked for there."""
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
        lines += [f'{metric}{{box="{box.name}"}} {int(getattr(box, name))}' for box in pool.boxes]
    return "\n".join([*lines, *used_lines(accounts)]) + "\n"
