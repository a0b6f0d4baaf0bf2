"""The chat: echo of a key, alone and with eight streams (bar: p95 30 ms), and first paint.

python -m benchmarks.chat [--rounds 6] [--streams 8] [--every 0.12] [--starts 5]

A server of ours decodes for the streams, and a separate process reads them. The chat uses that
server and runs in a pseudo terminal. A key's time ends when the terminal receives its letter. All
processes share this machine's cores. The chat must get a core while the engine's threads use them,
as on a user's machine.

A start is timed in a pseudo terminal until the input's hints are drawn, with the starter model.
Then a conversation of 2,000 turns is opened. While models are planned, the delay of a key is the
longest time in which the chat's event loop did not run. The load of the machine is printed too.

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
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home
from localllm.bench.stream import free_port
from localllm.cli.chat.planning import PlanningProcess
from localllm.conversation.history import History, StoredMessage
from localllm_tui.app import ChatApp
from localllm_tui.control import commands
from localllm_tui.control.chat_options import ChatOptions
from localllm_tui.control.client import ChatClient
from localllm_tui.control.interfaces import PlanRequest

BAR_MS = 30.0
FIRST_PAINT_S, OPEN_S, HELD_S = 0.6, 1.0, 0.05
TURNS = 2_000
_LOOK_S, _IDLE_S = 0.002, 3.0
# Letters that the chat does not show otherwise, and that are not part of a control sequence.
LETTERS = "αβγδεζηθικλμνξοπρστυφχψω"
CLEAR = b"\x15"  # Ctrl+U
_QUIET_S = 0.5
_LONGEST_S = 60.0
_ROWS, _COLUMNS = 40, 120


class Terminal:
    """A pseudo terminal with a program."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)

    def type(self, keys: bytes) -> None:
        """Press `keys`."""
        os.write(self._master, keys)

    def wait_for(self, shown: str) -> float:
        """Read until `shown` appears, and return its time by perf_counter. Raises TimeoutError."""
        end_s, read = time.perf_counter() + _LONGEST_S, b""
        while shown.encode() not in read:
            if not select.select([self._master], [], [], max(0.0, end_s - time.perf_counter()))[0]:
                raise TimeoutError(f"{shown!r} did not come")
            read += os.read(self._master, 65_536)
        return time.perf_counter()

    def drain(self, seconds: float) -> None:
        """Read all output for `seconds`."""
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            if select.select([self._master], [], [], left_s)[0]:
                os.read(self._master, 65_536)

    def cpu_s(self) -> float:
        """Processor seconds of the program and its children so far."""
        parent = psutil.Process(self._process.pid)
        processes = [parent, *parent.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def close(self) -> None:
        """End the program."""
        self._process.terminate()
        with contextlib.suppress(OSError):  # its end of the terminal may be closed
            self.drain(_QUIET_S)
        self._process.wait()
        os.close(self._master)


def echoes_ms(terminal: Terminal, every_s: float) -> list[float]:
    """Type each letter once, with pauses of `every_s` seconds, and return the time of each. The
    input is empty again afterwards."""
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
    """Run `streams` streams, all past their prompts when the block begins. Yields the number of
    text events that they received."""
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
    """Return the times alone and the times with the streams, measured in turns."""
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
            print(
                f"  round {n + 1}/{given.rounds}, the streams got {rate:.0f} pieces/s",
                file=sys.stderr,
            )
    finally:
        terminal.close()
    return alone, beside


def first_paint_s(folder: Path) -> float:
    """Return the seconds from the program's start until its hints are on the screen."""
    begun_s = time.perf_counter()
    terminal = Terminal(
        [sys.executable, "-m", "localllm", "chat", "-m", "smollm2-135m-instruct"], folder
    )
    try:
        return terminal.wait_for("F1 help") - begun_s
    finally:
        terminal.close()


async def open_and_plan(folder: Path) -> tuple[float, float, float]:
    """Return the seconds until a conversation of 2,000 turns is on screen, and the longest time
    without the event loop while models are planned, and while the chat is idle."""
    desk = PlanningProcess(offline=True)
    with History(folder / "conversations.db") as history:
        conv = history.create("long", "none")
        roles = ("assistant", "user")
        history.add(
            conv,
            [
                StoredMessage(i, roles[i % 2], f"turn {i} " + "words " * 40, parent_id=i - 1)
                for i in range(1, TURNS + 1)
            ],
        )
        async with ChatClient(f"http://127.0.0.1:{free_port()}/v1") as client:
            app = ChatApp(ChatOptions(client, history, "none", model_service=desk), lambda _: True)
            async with app.run_test(size=(120, 40)) as pilot:
                await pilot.pause()
                begun_s = time.perf_counter()
                await commands.run_and_report(app.chat, "continue", "")
                await pilot.pause()
                opened_s = time.perf_counter() - begun_s
                planning = asyncio.create_task(asyncio.to_thread(desk.plan, PlanRequest()))
                held_s = await longest_s(planning)
                idle_s = await longest_s(asyncio.create_task(asyncio.sleep(_IDLE_S)))
    desk.close()
    return opened_s, held_s, idle_s


async def longest_s(
    beside: asyncio.Task[Any], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the longest time in which the event loop did not run until `beside` was done. With the
    clock `time.thread_time` it is processor time, which other programs do not lengthen."""
    waited_s = _LOOK_S if clock is time.perf_counter else 0.0
    longest, last_s = 0.0, clock()
    while not beside.done():
        await asyncio.sleep(_LOOK_S)
        now_s = clock()
        longest, last_s = max(longest, now_s - last_s - waited_s), now_s
    await beside
    return longest


def main() -> None:
    """Measure, print, and exit with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--every", type=float, default=0.12)
    parser.add_argument("--starts", type=int, default=5)
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with empty_home() as folder:
        starts = sorted(first_paint_s(folder) for _ in range(given.starts))
        opened_s, held_s, idle_s = asyncio.run(open_and_plan(folder))
        port = free_port()
        server = Server(
            "localllm",
            serve_command(smollm2(), port, "--quiet", "--parallel", str(given.streams)),
            port,
        )
        server.start()
        try:
            alone, beside = _measure(f"http://127.0.0.1:{port}", folder, given)
        finally:
            server.stop()
    start_s, p95_ms = statistics.median(starts), statistics.quantiles(beside, n=20)[-1]
    print(f"first paint: median {start_s:.2f} s, best {starts[0]:.2f} s (bar {FIRST_PAINT_S} s)")
    print(f"{TURNS:,} turns open: {opened_s:.2f} s (bar {OPEN_S} s)")
    print(
        f"planning holds the loop {held_s * 1e3:.0f} ms (bar {HELD_S * 1e3:.0f} ms), other "
        f"programs {idle_s * 1e3:.0f} ms"
    )
    for what, times in (("alone", alone), (f"beside {given.streams} streams", beside)):
        print(
            f"{what:18} median {statistics.median(times):5.1f} ms, p95 "
            f"{statistics.quantiles(times, n=20)[-1]:5.1f} ms, "
            f"longest {max(times):5.1f} ms, {len(times)} keys"
        )
    sys.exit(
        int(start_s > FIRST_PAINT_S or opened_s > OPEN_S or held_s > HELD_S or p95_ms > BAR_MS)
    )


if __name__ == "__main__":
    main()
