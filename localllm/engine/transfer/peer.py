"""Another server that computes KV, as the asking server knows it: its address, and its learnt costs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from localllm.engine.step_costs import PrefillCost
from localllm.engine.transfer import frames, wire
from localllm.engine.transfer.errors import BadFrameError, TransferError

if TYPE_CHECKING:
    import httpx

# seconds. A server that gives no byte for this long is given up by the thread that reads. For a
# transfer, the engine itself gives up a late block much earlier (`Conductor.late`).
_SILENCE_S = 60.0
_PROBE_SILENCE_S = 5.0
_CONNECT_S = 2.0
# seconds. A server that failed is left out for the first time, then for twice as long after each
# further failure in a row.
_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 60.0
_PROBE_BYTES = 2**20
_MAX_ERROR_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class KvAnswer:
    """The `pieces` of a response, and its connection."""

    pieces: Iterator[bytes]
    connection: socket.socket

    def hang_up(self) -> None:
        """End the connection, from any thread. A thread that reads gets an error at once."""
        with suppress(OSError):
            # The method of TLS sockets may not be called while another thread reads.
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


@dataclass
class KvPeer:
    """The server at `url`, asked with `key` for KV of the served model called `model`.

    `token_bytes`: the memory of a token in the context (0: unknown).
    `patience_s`: is added to the time in which it must answer the measurement of the link.
    `max_tokens`: the length of the longest prompt that it reads (0: unknown).
    `cost`: seconds for a transfer of a number of tokens, learnt from all transfers.
    `report`: called with a sentence if the server can't be used, once until it works again.
    """

    url: str
    key: str | None
    model: str
    identity: dict[str, str]
    report: Callable[[str], object]
    clock: Callable[[], float] = time.monotonic
    cost: PrefillCost = field(default_factory=PrefillCost)
    token_bytes: float = 0.0
    patience_s: float = 0.0
    max_tokens: int = 0
    link_bytes_s: float = 0.0
    _not_before_s: float = float("-inf")
    _pause_s: float = _FIRST_PAUSE_S
    _failing: bool = False
    _closed: threading.Event = field(default_factory=threading.Event)
    _client: httpx.Client | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """Host and port, as receipts and messages show them."""
        return urlsplit(self.url).netloc

    @property
    def usable(self) -> bool:
        """False for a while after a failure."""
        return self.clock() >= self._not_before_s

    def record_success(self) -> None:
        """Record that a transfer succeeded."""
        self._pause_s = _FIRST_PAUSE_S
        self._not_before_s = float("-inf")
        self._failing = False

    def record_failure(self, error: TransferError) -> None:
        """Leave the server out for a while, and report the failure unless it was reported."""
        self._not_before_s = self.clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        if not self._failing:
            self._failing = True
            # Part of the text comes from the other server.
            reason = _printable(error.message)
            self.report(
                f"prompts are read here, without the KV of {self.name}: {reason}; it is asked "
                "again from time to time"
            )

    def start(self) -> None:
        """Measure the link in a thread of its own, and repeat that while the server is off."""
        threading.Thread(target=self._watch, name="kv-probe", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self.probe()
            except TransferError as e:
                self.record_failure(e)
            else:
                self.record_success()
                return
            self._closed.wait(max(self._not_before_s - self.clock(), _FIRST_PAUSE_S))

    def probe(self) -> None:
        """Ask for the server's speed, and measure the link's. Raises TransferError."""
        head: dict[str, Any] = {}
        began = self.clock()
        reader = wire.FrameReader(0)
        silence_s = _PROBE_SILENCE_S + self.patience_s
        with self.open_response({"tokens": [], "pads": _PROBE_BYTES}, silence_s) as answer:
            first_s = self.clock() - began
            began = self.clock()
            for piece in answer.pieces:
                for frame in reader.feed(piece):
                    if frame.kind == frames.HEAD:
                        head = frame.words()
                    elif frame.kind == frames.DONE:
                        self._learn_link(head, first_s, self.clock() - began)
                        return
        raise TransferError("it broke off its answer", reason="cut")

    def accepts(self, n_tokens: int) -> bool:
        """True if it can be asked now for the KV of a prompt of this length."""
        return self.usable and n_tokens <= (self.max_tokens or n_tokens)

    def _learn_link(self, head: dict[str, Any], first_s: float, pads_s: float) -> None:
        self.link_bytes_s = _PROBE_BYTES / max(pads_s, 1e-6)
        token_s = 0.0
        speed = head.get("prefill_tok_s")
        max_tokens = head.get("most_tokens")
        if isinstance(max_tokens, int):
            self.max_tokens = max_tokens
        if isinstance(speed, (int, float)) and speed > 0:
            token_s = max(1 / speed, self.token_bytes / self.link_bytes_s)
        if token_s and not self.cost.token_s:
            self.cost.learn(wire.BLOCK_TOKENS, first_s + wire.BLOCK_TOKENS * token_s)

    @contextmanager
    def open_response(
        self, body: dict[str, Any], silence_s: float = _SILENCE_S
    ) -> Iterator[KvAnswer]:
        """Send a request, and yield its response. Raises TransferError, also if the server gives no
        byte for `silence_s`."""
        import httpx

        headers = {"accept": frames.MEDIA_TYPE, "accept-encoding": "identity"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        full_body = {"model": self.model, "identity": self.identity, **body}
        timeout = httpx.Timeout(silence_s, connect=_CONNECT_S, pool=None)
        try:
            with self._http().stream(
                "POST", f"{self.url}/v1/kv", json=full_body, headers=headers, timeout=timeout
            ) as answer:
                if answer.status_code != 200:
                    raise TransferError(_refusal(answer), reason="refused")
                stream = answer.extensions["network_stream"]
                yield KvAnswer(answer.iter_raw(), stream.get_extra_info("socket"))
        except httpx.ConnectError as e:
            reason = "it can't be reached"
            if "CERTIFICATE_VERIFY_FAILED" in str(e):
                reason = "its certificate is not trusted (SSL_CERT_FILE names a file with it)"
            raise TransferError(reason, reason="unreachable") from e
        except httpx.TimeoutException as e:
            raise TransferError(f"it gave no answer for {silence_s:g} s", reason="late") from e
        except (httpx.HTTPError, httpx.StreamError, OSError) as e:
            raise TransferError(f"the connection broke ({type(e).__name__})", reason="cut") from e

    def _http(self) -> httpx.Client:
        import httpx

        with self._lock:
            if self._client is None:
                certificates = httpx.create_ssl_context()
                self._client = httpx.Client(trust_env=False, verify=certificates)
            return self._client

    def close(self) -> None:
        """Stop measuring, and close the connections. A transfer that still runs ends."""
        self._closed.set()
        with self._lock:
            if self._client is not None:
                self._client.close()


def _refusal(answer: httpx.Response) -> str:
    """The reason in a refused request, from a bounded part of the response."""
    body = b""
    for piece in answer.iter_bytes():
        body += piece
        if len(body) > _MAX_ERROR_BYTES:
            break
    try:
        message = wire.Frame(b"", memoryview(body)).words()["error"]["message"]
    except (BadFrameError, KeyError, TypeError):
        message = ""
    text = _printable(str(message)[:300])
    if text:
        return f"it answers {answer.status_code}: {text}"
    return f"it answers {answer.status_code}"


def _printable(text: str) -> str:
    return "".join(c for c in text if c.isprintable())
