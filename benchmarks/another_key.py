"""How long another key waits while one key does everything that it may do.

    python -m benchmarks.another_key [--rounds 5] [--only NAME …] [--model FILE]

One key does one of twelve things again and again, from as many threads as it may have. Another key
asks short questions: its first token, alone and meanwhile. Bar: 2 times as long as alone, and 0.2 s
more, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home, running
from localllm.bench.scenarios import unique, user
from localllm.bench.stream import free_port

_THREADS = 8
_SETTLE_S = 1.5
_TIMEOUT_S = 60.0
_KEYS = {name: f"{name}-{name}-{name}-{name}" for name in ("busy", "other")}
_CHAT = "/v1/chat/completions"

Behaviour = Callable[["Client", int], None]


class Client:
    """Sends requests of the busy key."""

    def __init__(self, port: int, model: str) -> None:
        self.port = port
        self.model = model

    def send(
        self, method: str, path: str, body: Any = None, *, leave: bool = False, **headers: str
    ) -> None:
        """Send a request and read its answer, or leave after the first bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        data = None if body is None else json.dumps(body)
        sent = {"authorization": f"Bearer {_KEYS['busy']}", "content-type": "application/json"}
        connection.request(method, path, data, {**sent, **headers})
        answer = connection.getresponse()
        if leave:
            answer.read(1)
        else:
            answer.read()
        connection.close()

    def chat(self, text: str, n_tokens: int, *, leave: bool = False, **more: Any) -> None:
        """Ask for an answer of `n_tokens`, as a stream if the client leaves it."""
        headers = more.pop("headers", {})
        body = {"model": self.model, "messages": user(text), "max_tokens": n_tokens, **more}
        self.send("POST", _CHAT, {**body, "stream": leave}, leave=leave, **headers)


def _schema(n: int) -> dict[str, Any]:
    members = {f"m{n}_{i}": {"type": "string", "maxLength": 99} for i in range(400)}
    shape = {"type": "object", "properties": members}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": shape}}


def _tools(n: int) -> list[dict[str, Any]]:
    members = {f"p{i}": {"type": "string"} for i in range(20)}
    parameters = {"type": "object", "properties": members}
    return [
        {"type": "function", "function": {"name": f"f{n}_{i}", "parameters": parameters}}
        for i in range(20)
    ]


def _silent(client: Client, _: int) -> None:
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        time.sleep(1.0)


BEHAVIOURS: dict[str, Behaviour] = {
    "long answers": lambda c, n: c.chat(unique(8, n), 400, ignore_eos=True),
    "long prompts": lambda c, n: c.chat(unique(1500, n), 2),
    "16 choices": lambda c, n: c.chat(unique(8, n), 64, n=16, ignore_eos=True),
    "new schemas": lambda c, n: c.chat(unique(8, n), 16, response_format=_schema(n)),
    "many tools": lambda c, n: c.chat(unique(8, n), 16, tools=_tools(n), tool_choice="required"),
    "long texts": lambda c, n: c.chat(chr(97 + n % 26) * 6_000_000, 2),
    "left streams": lambda c, n: c.chat(unique(8, n), 200, leave=True),
    "kept streams": lambda c, n: c.chat(
        unique(8, n), 200, leave=True, headers={"Idempotency-Key": f"k{n}"}
    ),
    "listings": lambda c, _: c.send("GET", "/openapi.json"),
    "counts": lambda c, n: c.send(
        "POST",
        "/v1/messages/count_tokens",
        {"model": c.model, "messages": user(unique(60_000, n))},
    ),
    "log-probabilities": lambda c, n: c.chat(
        unique(8, n), 64, logprobs=True, top_logprobs=20, ignore_eos=True
    ),
    "silent connections": _silent,
}


@contextmanager
def _doing(behaviour: Behaviour, client: Client) -> Iterator[None]:
    """Repeat `behaviour` in threads while the block runs. Refusals and cut answers are no error."""
    over = threading.Event()

    def repeat(first: int) -> None:
        n = first
        while not over.is_set():
            with suppress(OSError, http.client.HTTPException):
                behaviour(client, n)
            n += _THREADS

    threads = [threading.Thread(target=repeat, args=[i], daemon=True) for i in range(_THREADS)]
    for thread in threads:
        thread.start()
    time.sleep(_SETTLE_S)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(_TIMEOUT_S)


def _first_tokens(server: Server, rounds: int, seeds: Iterator[int]) -> list[float]:
    found = []
    for _ in range(rounds):
        found.append(server.target.chat(user(unique(8, next(seeds))), 4).ttft_s)
        time.sleep(0.2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=[*BEHAVIOURS], default=[*BEHAVIOURS])
    parser.add_argument("--model", type=Path, default=smollm2())
    options = parser.parse_args()
    seeds = iter(range(10**6, 2 * 10**6))
    with empty_home() as home:
        (home / "config").mkdir()
        tables = [
            f'[keys.{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
            for name, key in _KEYS.items()
        ]
        (home / "config" / "config.toml").write_text("".join(tables))
        port = free_port()
        command = serve_command(options.model, port, "--context", "8192")
        with running([Server("localllm", command, port, key=_KEYS["other"])]) as [server]:
            client = Client(port, "")
            _first_tokens(server, 2, seeds)
            alone_s = statistics.median(_first_tokens(server, options.rounds, seeds))
            bar_s = 2 * alone_s + 0.2
            print(f"{'alone':20} median {alone_s:.2f} s, bar {bar_s:.2f} s")
            for name in options.only:
                with _doing(BEHAVIOURS[name], client):
                    waited = _first_tokens(server, options.rounds, seeds)
                verdict = "ok" if max(waited) <= bar_s else "above the bar"
                median_s = statistics.median(waited)
                print(f"{name:20} median {median_s:.2f} s, longest {max(waited):.2f} s  {verdict}")


if __name__ == "__main__":
    main()
