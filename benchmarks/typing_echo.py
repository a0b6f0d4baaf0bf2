"""From a key to its letter on the screen, in the real chat, alone and while eight streams decode (bar: p95 of 30 ms).

python -m benchmarks.typing_echo [--rounds 6] [--streams 8] [--every 0.12]

A server of ours decodes for the streams, which are read in a process of their own; the chat asks that server and runs in a
pseudo terminal. A key's time ends when the terminal is sent its letter. All of it shares this machine's cores: the chat has
to get one while the engine's threads hold them, as it has to at home.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home
from benchmarks.timing import percentile
from localllm.bench.stream import free_port

BAR_MS = 30.0
# None of them is in what the chat shows otherwise, and none is part of a control sequence.
LETTERS = "αβγδεζηθικλμνξοπρστυφχψω"
CLEAR = b"\x15"  # Ctrl+U
_QUIET_S = 0.5
_LONGEST_S = 60.0
_ROWS, _COLUMNS = 40, 120


class Terminal:
    """A pseudo terminal and the program in it."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment, start_new_session=True
        )
        os.close(slave)

    def type(self, keys: bytes) -> None:
        """Press `keys`."""
        os.write(self._master, keys)

    def wait_for(self, shown: str) -> float:
        """Read until `shown` comes; by perf_counter when it did. Raises TimeoutError."""
        end_s, read = time.perf_counter() + _LONGEST_S, b""
        while shown.encode() not in read:
            if not select.select([self._master], [], [], max(0.0, end_s - time.perf_counter()))[0]:
                raise TimeoutError(f"{shown!r} did not come")
            read += os.read(self._master, 65_536)
        return time.perf_counter()

    def drain(self, seconds: float) -> None:
        """Read whatever comes, for `seconds`."""
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            if select.select([self._master], [], [], left_s)[0]:
                os.read(self._master, 65_536)

    def close(self) -> None:
        """End the program."""
        self._process.terminate()
        with contextlib.suppress(OSError):  # its side of the terminal may be gone
            self.drain(_QUIET_S)
        self._process.wait()
        os.close(self._master)


def echoes_ms(terminal: Terminal, every_s: float) -> list[float]:
    """Type each letter once, one every so many seconds; what each took. The input is empty again when it returns."""
    took: list[float] = []
    for letter in LETTERS:
        begun_s = time.perf_counter()
        terminal.type(letter.encode())
        took.append(1000 * (terminal.wait_for(letter) - begun_s))
        terminal.drain(every_s)
    terminal.type(CLEAR)
    terminal.drain(_QUIET_S)
    return took


def _stream(url: str, streams: int, all_decode: Event, pieces: Synchronized[int]) -> None:
    asyncio.run(_stream_all(url, streams, all_decode, pieces))


async def _stream_all(url: str, streams: int, all_decode: Event, pieces: Synchronized[int]) -> None:
    decoding: set[int] = set()

    async def one(http: httpx.AsyncClient, number: int) -> None:
        question = [{"role": "user", "content": f"Tell story number {number}."}]
        body = {"messages": question, "stream": True, "max_tokens": 4000, "ignore_eos": True}
        while True:
            async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                reply.raise_for_status()
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        pieces.value += 1
                        decoding.add(number)
                        if len(decoding) == streams:
                            all_decode.set()

    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300, limits=limits) as http:
        await asyncio.gather(*(one(http, n) for n in range(streams)))


@contextlib.contextmanager
def decoding(url: str, streams: int) -> Iterator[Synchronized[int]]:
    """So many streams, all of them past their prompts when the block begins; how many pieces of text they have got."""
    apart = multiprocessing.get_context("spawn")
    all_decode, pieces = apart.Event(), apart.Value("q", 0)
    process = apart.Process(target=_stream, args=(url, streams, all_decode, pieces))
    process.start()
    try:
        if not all_decode.wait(_LONGEST_S):
            raise TimeoutError("the streams did not begin")
        yield pieces
    finally:
        process.terminate()
        process.join()


def _measure(url: str, folder: Path, given: argparse.Namespace) -> tuple[list[float], list[float]]:
    """(times alone, times beside the streams), by turns."""
    terminal = Terminal([sys.executable, "-m", "localllm", "chat", "--url", url], folder)
    alone, beside = [], []
    try:
        terminal.wait_for("F1 help")
        terminal.drain(2.0)
        for n in range(given.rounds):
            alone += echoes_ms(terminal, given.every)
            with decoding(url, given.streams) as pieces:
                before, begun_s = pieces.value, time.perf_counter()
                beside += echoes_ms(terminal, given.every)
                rate = (pieces.value - before) / (time.perf_counter() - begun_s)
            terminal.drain(1.0)
            print(f"  round {n + 1}/{given.rounds}, the streams got {rate:.0f} pieces/s", file=sys.stderr)
    finally:
        terminal.close()
    return alone, beside


def main() -> None:
    """Run and report; the exit status says whether the bar was met beside the streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--every", type=float, default=0.12)
    given = parser.parse_args()
    with empty_home() as folder:
        port = free_port()
        server = Server("localllm", serve_command(smollm2(), port, "--quiet", "--parallel", str(given.streams)), port)
        server.start()
        try:
            alone, beside = _measure(f"http://127.0.0.1:{port}", folder, given)
        finally:
            server.stop()
    for what, times in (("alone", alone), (f"beside {given.streams} streams", beside)):
        print(
            f"{what:18} median {percentile(times, 0.5):5.1f} ms, p95 {percentile(times, 0.95):5.1f} ms, "
            f"longest {max(times):5.1f} ms, {len(times)} keys"
        )
    sys.exit(int(percentile(beside, 0.95) > BAR_MS))


if __name__ == "__main__":
    main()
