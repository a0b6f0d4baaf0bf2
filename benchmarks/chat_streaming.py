"""The chat's processor time while one answer streams (bar: 12 % of a core).

python -m benchmarks.chat_streaming [--rates 30 50] [--seconds 12] [--rounds 2]

A server of this benchmark streams Markdown at a steady rate, so no model takes part. The chat runs
in a pseudo terminal. Its processor time is that of its processes. Other programs on the machine
lengthen it a little. With these options it takes 80 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.chat import Terminal
from benchmarks.processes import empty_home

BAR = 0.12
_PARAGRAPH = (
    "The **river** runs from the hills to the sea, and `code` names its parts. A list follows:\n\n"
    "- the first item of the list\n- the second item, with *emphasis*\n\n"
    "```python\nfor name in rivers:\n    print(name, length_km[name])\n```\n\n"
)
# One token has about four characters.
_TOKEN_CHARS = 4
_BEFORE_S, _AFTER_S = 2.0, 1.0
_STOP = b"\x1b"  # Esc


class SteadyServer:
    """A server that answers each question with `seconds` of text, in `rate` pieces per second."""

    def __init__(self, seconds: float) -> None:
        self.rate = 1.0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Print nothing."""

            def do_GET(self) -> None:
                body = json.dumps({"object": "list", "data": [{"id": "steady"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not asked.get("stream"):
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the chat left
                    self._stream()

            def _stream(self) -> None:
                begun_s = time.perf_counter()
                for n in range(int(owner.rate * seconds)):
                    time.sleep(max(0.0, begun_s + n / owner.rate - time.perf_counter()))
                    at = n * _TOKEN_CHARS % len(_PARAGRAPH)
                    self._send({"content": _PARAGRAPH[at : at + _TOKEN_CHARS]}, None)
                self._send({}, "stop")
                self.wfile.write(b"data: [DONE]\n\n")

            def _send(self, delta: dict[str, str], reason: str | None) -> None:
                choice = {"index": 0, "delta": delta, "finish_reason": reason}
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                self.wfile.flush()

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()


def share_of_a_core(terminal: Terminal, seconds: float) -> float:
    """Return the chat's processor time ÷ the time, while its output is read for `seconds`."""
    cpu_s, begun_s = terminal.cpu_s(), time.perf_counter()
    terminal.drain(seconds)
    return (terminal.cpu_s() - cpu_s) / (time.perf_counter() - begun_s)


def main() -> None:
    """Measure, print the shares, and exit with 1 if a rate misses the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[30.0, 50.0])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    server = SteadyServer(options.seconds + 2 * _BEFORE_S)
    shares: dict[float, list[float]] = {rate: [] for rate in options.rates}
    idle: list[float] = []
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with empty_home() as folder:
        command = [sys.executable, "-m", "localllm", "chat", "--url", server.url]
        terminal = Terminal(command, folder)
        terminal.wait_for("F1 help")
        terminal.drain(_BEFORE_S)
        for _ in range(options.rounds):
            idle.append(share_of_a_core(terminal, options.seconds / 4))
            for rate in options.rates:
                server.rate = rate
                terminal.type(b"/new\r")
                terminal.drain(_AFTER_S)
                terminal.type(b"Tell me about rivers.\r")
                terminal.drain(_BEFORE_S)
                shares[rate].append(share_of_a_core(terminal, options.seconds))
                terminal.type(_STOP)
                terminal.drain(_AFTER_S)
        terminal.close()
    print(f"idle: {statistics.median(idle):.1%} of a core")
    for rate, found in shares.items():
        each = ", ".join(f"{share:.1%}" for share in found)
        print(f"{rate:.0f} tok/s: {statistics.median(found):.1%} of a core ({each}; bar {BAR:.0%})")
    sys.exit(int(any(statistics.median(found) > BAR for found in shares.values())))


if __name__ == "__main__":
    main()
