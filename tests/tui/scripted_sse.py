"""A chat completions server that plays scripts, for the chat's tests.

It uses real HTTP and real SSE, without a model and without a clock.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Say:
    """Send one delta per piece. `field` may be "reasoning_content"."""

    pieces: Iterable[str]
    field: str = "content"


@dataclass(frozen=True)
class Comment:
    text: str


@dataclass
class Gate:
    """Stop the script until the test opens the gate. `reached` is set at the stop."""

    opened: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)


@dataclass
class UntilGone:
    """Stop the script until the client closes the connection, and then set `gone`."""

    gone: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Finish:
    reason: str = "stop"
    usage: tuple[int, int, int] = (11, 7, 3)
    timings: dict[str, float] | None = None


@dataclass(frozen=True)
class Raw:
    """Send these bytes unchanged."""

    data: bytes


@dataclass(frozen=True)
class Refuse:
    """Send an HTTP error instead of a stream."""

    status: int
    error: dict[str, Any]


@dataclass(frozen=True)
class Json:
    """Send a JSON body instead of a stream."""

    body: dict[str, Any]


@dataclass(frozen=True)
class Drop:
    """Close the connection at this point."""


class ScriptedServer:
    """A server on a free loopback port, run as a context manager.

    `requests` are the bodies received.
    """

    def __init__(
        self,
        *,
        model: str = "scripted",
        n_ctx: int | None = 1000,
        models: list[dict[str, Any]] | None = None,
        api_key: str | None = None,
    ):
        self.api_key = api_key
        self.models = models or [
            {"id": model, "object": "model", **({"context_length": n_ctx} if n_ctx else {})}
        ]
        self.scripts: deque[list[Any]] = deque()
        self.requests: list[dict[str, Any]] = []
        # the token count of a text; None: this server does not count
        self.count: Callable[[str], int] | None = None

    def play(self, *script: Any) -> None:
        """Answer one more request with `script`."""
        self.scripts.append(list(script))

    def answer(self, text: str, **finish: Any) -> None:
        """Answer one more request with `text`, one word per delta."""
        words = text.split(" ")
        self.play(Say([w if i == 0 else " " + w for i, w in enumerate(words)]), Finish(**finish))

    def __enter__(self) -> ScriptedServer:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                if owner.api_key and self.headers["Authorization"] != f"Bearer {owner.api_key}":
                    self._json(401, {"error": {"message": "no"}})
                    return
                self._json(200, {"object": "list", "data": owner.models})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.endswith("/input_tokens"):
                    if owner.count is None:
                        self._json(404, {"error": {"message": "not found"}})
                    else:
                        text = "".join(m["content"] for m in body["input"])
                        self._json(200, {"input_tokens": owner.count(text)})
                    return
                owner.requests.append(body)
                script = owner.scripts.popleft()
                if isinstance(script[0], Refuse):
                    self._json(script[0].status, {"error": script[0].error})
                    return
                if isinstance(script[0], Json):
                    self._json(200, script[0].body)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                try:
                    for step in script:
                        self._step(step, body)
                except (BrokenPipeError, ConnectionResetError):
                    pass

            def _step(self, step: Any, body: dict[str, Any]) -> None:
                if isinstance(step, Say):
                    for piece in step.pieces:
                        self._chunk(
                            {
                                "choices": [
                                    {
                                        "index": 0,
                                        "delta": {step.field: piece},
                                        "finish_reason": None,
                                    }
                                ]
                            }
                        )
                elif isinstance(step, Comment):
                    self.wfile.write(f": {step.text}\n\n".encode())
                elif isinstance(step, Raw):
                    self.wfile.write(step.data)
                elif isinstance(step, Gate):
                    self.wfile.flush()
                    step.reached.set()
                    step.opened.wait()
                elif isinstance(step, UntilGone):
                    self.connection.recv(1)
                    step.gone.set()
                elif isinstance(step, Finish):
                    self._chunk(
                        {"choices": [{"index": 0, "delta": {}, "finish_reason": step.reason}]}
                    )
                    prompt, completion, cached = step.usage
                    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
                    usage |= {
                        "total_tokens": prompt + completion,
                        "prompt_tokens_details": {"cached_tokens": cached},
                    }
                    if body.get("stream_options", {}).get("include_usage"):
                        more = {"timings": step.timings} if step.timings else {}
                        self._chunk({"choices": [], "usage": usage, **more})
                    self.wfile.write(b"data: [DONE]\n\n")
                else:
                    assert isinstance(step, Drop)
                    self.connection.close()

            def _chunk(self, chunk: dict[str, Any]) -> None:
                self.wfile.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())
                self.wfile.flush()

            def _json(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._http.server_port}/v1"
        # A short poll interval, because shutdown waits for it.
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
