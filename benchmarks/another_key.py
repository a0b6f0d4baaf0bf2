"""How long a key's requests wait while another key uses the server as much as it can.

    python -m benchmarks.another_key [--rounds 5] [--only NAME …] [--model FILE]

The busy key repeats one of twelve actions from eight threads. The other key asks short questions,
and the time to its first token is measured, alone and meanwhile. Bar: 2 times as long as alone,
plus 0.2 s, on a machine without other load. Five rounds of all twelve take about three minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import itertools
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home, running
from localllm.bench.scenarios import unseen_text, user
from localllm.bench.stream import free_port

_THREADS = 8
_SETTLE_S = 2.5
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
        data = None if body is None else json.dumps(body)
        sent = {"authorization": f"Bearer {_KEYS['busy']}", "content-type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        with closing(connection):
            connection.request(method, path, data, {**sent, **headers})
            with connection.getresponse() as answer:
                answer.read(1 if leave else None)

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
    with socket.create_connection(("127.0.0.1", client.port), _TIMEOUT_S) as connected:
        connected.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        time.sleep(1.0)


BEHAVIOURS: dict[str, Behaviour] = {
    "long answers": lambda c, n: c.chat(unseen_text(8, n), 400, ignore_eos=True),
    "long prompts": lambda c, n: c.chat(unseen_text(1500, n), 2),
    "16 choices": lambda c, n: c.chat(unseen_text(8, n), 64, n=16, ignore_eos=True),
    "new schemas": lambda c, n: c.chat(unseen_text(8, n), 16, response_format=_schema(n)),
    "many tools": lambda c, n: c.chat(
        unseen_text(8, n), 16, tools=_tools(n), tool_choice="required"
    ),
    "long texts": lambda c, n: c.chat(chr(97 + n % 26) * 6_000_000, 2),
    "left streams": lambda c, n: c.chat(unseen_text(8, n), 200, leave=True),
    "kept streams": lambda c, n: c.chat(
        unseen_text(8, n), 200, leave=True, headers={"Idempotency-Key": f"k{n}"}
    ),
    "listings": lambda c, _: c.send("GET", "/openapi.json"),
    "counts": lambda c, n: c.send(
        "POST",
        "/v1/messages/count_tokens",
        {"model": c.model, "messages": user(unseen_text(60_000, n))},
    ),
    "log-probabilities": lambda c, n: c.chat(
        unseen_text(8, n), 64, logprobs=True, top_logprobs=20, ignore_eos=True
    ),
    "silent connections": _silent,
}


def _repeat(name: str, port: int, first: int) -> None:
    """Repeat one action. Rejected requests and truncated answers are not errors."""
    client = Client(port, "")
    for n in itertools.count(first, _THREADS):
        with suppress(OSError, http.client.HTTPException):
            BEHAVIOURS[name](client, n)


def _be_busy(name: str, port: int) -> None:
    """Run the busy key's actions in its process."""
    threads = [threading.Thread(target=_repeat, args=(name, port, i)) for i in range(_THREADS)]
    for thread in threads:
        thread.start()


@contextmanager
def _doing(name: str, port: int) -> Iterator[None]:
    """Repeat one action while the block runs. It runs in a separate process, because creating texts
    of 6 MB would block the interpreter that measures."""
    busy = multiprocessing.get_context("spawn").Process(target=_be_busy, args=(name, port))
    busy.start()
    time.sleep(_SETTLE_S)
    try:
        yield
    finally:
        busy.kill()
        busy.join()


def _first_tokens(server: Server, rounds: int, seeds: Iterator[int]) -> list[float]:
    found = []
    for _ in range(rounds):
        found.append(server.target.chat(user(unseen_text(8, next(seeds))), 4).ttft_s)
        time.sleep(0.2)
    return found


def _tell(name: str, alone_s: float, waited: list[float]) -> None:
    bar_s = 2 * alone_s + 0.2
    verdict = "ok" if max(waited) <= bar_s else "above the bar"
    print(
        f"{name:20} alone {alone_s:.2f} s, median {statistics.median(waited):.2f} s, longest "
        f"{max(waited):.2f} s, bar {bar_s:.2f} s: {verdict}",
        flush=True,
    )


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
            _first_tokens(server, 2, seeds)
            for name in options.only:
                alone_s = statistics.median(_first_tokens(server, options.rounds, seeds))
                with _doing(name, port):
                    waited = _first_tokens(server, options.rounds, seeds)
                _tell(name, alone_s, waited)
                # Wait until the streams that the server kept for their clients have ended.
                time.sleep(_SETTLE_S)


if __name__ == "__main__":
    main()
