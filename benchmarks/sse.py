"""A client as thin as possible for timing streams: a socket, SSE lines, a clock."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Answer:
    """What came back, and when; `first_at_s` by perf_counter."""

    text: str = ""
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    usage: dict[str, object] = field(default_factory=dict)
    first_at_s: float = 0.0

    def gaps_between(self, begun_s: float, ended_s: float) -> list[float]:
        """The gaps that any part of this time (perf_counter) falls into."""
        found, at = [], self.first_at_s
        for gap in self.gaps_s:
            if at < ended_s and at + gap > begun_s:
                found.append(gap)
            at += gap
        return found

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first event; one event brings several tokens where drafts were accepted."""
        completed = self.usage.get("completion_tokens")
        after_first = completed - 1 if isinstance(completed, int) else len(self.gaps_s)
        return after_first / sum(self.gaps_s)


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_ready(port: int, most_s: float = 60.0) -> None:
    """Return when /health answers 200."""
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.02)
    raise SystemExit(f"no server on port {port}")


def stream(
    port: int,
    body: dict[str, object],
    *,
    on_token: Callable[[int], None] | None = None,
    stop_after: int | None = None,
) -> Answer:
    """POST /v1/chat/completions (/v1/completions for a body with a `prompt`) with stream=true and read it to the end, or
    leave after `stop_after` tokens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    started = time.perf_counter()
    payload = json.dumps({"model": "", **body, "stream": True, "stream_options": {"include_usage": True}})
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    connection.request("POST", path, payload, {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read()[:500]!r}")
    answer, last, n = Answer(), started, 0
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if chunk.get("usage"):
            answer.usage = chunk["usage"]
        choice = chunk["choices"][0] if chunk["choices"] else {}
        text = choice.get("text") or choice.get("delta", {}).get("content")
        if not text:
            continue
        now = time.perf_counter()
        if n:
            answer.gaps_s.append(now - last)
        else:
            answer.ttft_s, answer.first_at_s = now - started, now
        last, n = now, n + 1
        answer.text += text
        if on_token is not None:
            on_token(n)
        if stop_after is not None and n >= stop_after:
            break
    connection.close()
    return answer
