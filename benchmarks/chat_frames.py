"""Streams a long answer into the chat's screen and tells what its frames cost, by how much text is there already.

python -m benchmarks.chat_frames [TOKENS]     # default 20,000

A frame is what the chat's thread does between two looks at its event loop, 5 ms apart: in that time no key is taken. CPU
time is told beside the time passed, because other programs make the one longer and not the other. No model runs: a
scripted server in a process of its own says Markdown as fast as `TOKENS_S`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.queues import Queue
from pathlib import Path

from localllm.conversation.history import History
from localllm_tui.app import ChatApp
from localllm_tui.control.chat import ChatOptions
from localllm_tui.control.client import ChatClient

TOKENS_S = 200.0
LOOK_S = 0.005
LONG_S = 0.1
PARTS = 4


def words(tokens: int) -> Iterator[str]:
    """Markdown as models write it: paragraphs, lists, a table and code, again and again."""
    said = 0
    while True:
        section = said // 400 + 1
        text = (
            f"\n\n## Section {section}\n\n"
            + "Some plain words about this **and** that, with `code` in them. " * 6
            + "\n\n"
            + "".join(f"- point {n} of the list, and why it matters\n" for n in range(8))
            + "\n| name | value |\n|---|---|\n"
            + "".join(f"| row {n} | {n * n} |\n" for n in range(6))
            + "\n```python\n"
            + "".join(f"value_{n} = compute({n})  # line {n}\n" for n in range(12))
            + "```\n\n"
        )
        for piece in text.split(" "):
            yield piece + " "
            said += 1
            if said >= tokens:
                return


def serve(tokens: int, port: Queue[int]) -> None:
    """The scripted server, until it is terminated."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._json({"object": "list", "data": [{"id": "scripted", "context_length": 10 * tokens}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("/input_tokens"):
                self._json({"input_tokens": 5})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            began_s = time.monotonic()
            for n, piece in enumerate(words(tokens)):
                chunk = {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                time.sleep(max(0.0, began_s + n / TOKENS_S - time.monotonic()))
            end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
            self.wfile.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())

        def _json(self, body: dict[str, object]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    port.put(http.server_port)
    threading.Event().wait()


async def stream(base_url: str, folder: Path) -> list[tuple[float, float, int]]:
    """Frames as (seconds passed, CPU seconds, characters on screen)."""
    frames: list[tuple[float, float, int]] = []
    with History(folder / "conversations.db") as history:
        async with ChatClient(base_url) as client:
            app = ChatApp(ChatOptions(client, history, "scripted"), lambda _: True)
            app.chat.titles_after_s = None
            async with app.run_test(size=(120, 40)) as pilot:
                app.chat.composer.insert("go")
                await pilot.press("enter")
                while app.chat.answering:
                    at_s, cpu_s = time.monotonic(), time.thread_time()
                    await asyncio.sleep(LOOK_S)
                    passed_s = time.monotonic() - at_s - LOOK_S
                    frames.append((passed_s, time.thread_time() - cpu_s, len(app.chat.answer_text)))
    return frames


def tell(frames: list[tuple[float, float, int]], seconds: float) -> None:
    """One line for each part of the text, and the sum."""
    size = max(1, len(frames) // PARTS)
    for n in range(PARTS):
        part = frames[n * size : (n + 1) * size] if n < PARTS - 1 else frames[n * size :]
        cpu = sorted(f[1] for f in part)
        print(
            f"{max(f[2] for f in part):>9,} characters: {len(part):>6,} looks, longest {max(f[0] for f in part) * 1e3:6.0f} ms,"
            f" of CPU {cpu[-1] * 1e3:6.0f} ms, the 99th of a hundred {cpu[int(0.99 * len(cpu))] * 1e3:5.0f} ms"
        )
    over = sum(f[0] > LONG_S for f in frames)
    over_cpu = sum(f[1] > LONG_S for f in frames)
    cpu_s = sum(f[1] for f in frames)
    print(f"frames over {LONG_S * 1e3:.0f} ms: {over} (of CPU: {over_cpu}); {cpu_s / seconds:.0%} of a core")


def main() -> None:
    """Stream, and tell."""
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    context = multiprocessing.get_context("spawn")
    port: Queue[int] = context.Queue()
    server = context.Process(target=serve, args=(tokens, port), daemon=True)
    server.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            frames = asyncio.run(stream(f"http://127.0.0.1:{port.get()}/v1", Path(folder)))
            tell(frames, time.monotonic() - began_s)
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
