"""Our server against llama-server over HTTP: decode, concurrency, stall, warm turns, thrash, restart, cancel, memory.

    python -m benchmarks.serving --peer PATH/llama-server [--rounds 5] [--only single,stall] [--out FILE]

Both run on the same cores as the client, in turn (A B A B), on the same GGUF with the same number of threads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.models import serve_command, smollm2
from benchmarks.ratio import Comparison, write
from benchmarks.seen import Messages, Seen, llama_server_tokens
from benchmarks.speculation import prompt
from benchmarks.sse import Answer, free_port, stream, wait_ready

# Tokens the first stream gets in peace before the newcomer of "stall" arrives.
_ALONE = 60
SYSTEM = "You are a careful assistant. " + "Rule: answer shortly, plainly and only about what was asked. " * 110


@dataclass
class Server:
    """One server process and how to start it again."""

    name: str
    command: list[str]
    port: int
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0

    def start(self) -> float:
        """Start it; seconds until it answers /health."""
        begun = time.perf_counter()
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_ready(self.port)
        return time.perf_counter() - begun

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """End it and its children."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(sig)
        self.process.wait(timeout=20)
        psutil.wait_procs(children, timeout=10)

    def rss_bytes(self) -> int:
        """Resident memory of server and workers, file-backed pages included as the kernel counts them."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [parent, *parent.children(recursive=True)])

    def cpu_s(self) -> float:
        """CPU seconds of server and workers so far."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return sum(sum(p.cpu_times()[:2]) for p in [parent, *parent.children(recursive=True)])


def chat(server: Server, messages: list[dict[str, str]], n: int, **extra: object) -> Answer:
    """One greedy streamed chat answer of exactly n tokens."""
    body = {"messages": messages, "max_tokens": n, "temperature": 0, "ignore_eos": True, **extra}
    return stream(server.port, body)


def user(text: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def unique(words: int, seed: int) -> str:
    """Text no cache has seen."""
    return " ".join(f"w{(seed * 7919 + i * 104729) % 9973}" for i in range(words))


class Scenarios:
    """Each method runs one scenario once on one server and records its figures."""

    def __init__(self, tokens: Callable[[Messages], list[int]]) -> None:
        self.tokens = tokens
        self.tables: dict[str, Comparison] = {}
        self.seed = int(time.time())

    def put(self, title: str, unit: str, server: Server, value: float) -> None:
        """Record one figure."""
        self.tables.setdefault(title, Comparison(title, unit)).add(server.name, value)

    def fresh(self) -> int:
        """A seed nobody used."""
        self.seed += 1
        return self.seed

    def single(self, s: Server) -> None:
        """Decode speed of one stream."""
        self.put("decode, one stream", "tok/s", s, chat(s, user(f"Tell a story. {self.fresh()}"), 128).decode_tok_s)

    def streams(self, s: Server, n: int) -> None:
        """Aggregate decode of n streams that start together."""
        answers: list[Answer] = []
        begun = time.perf_counter()
        texts = [f"Tell story {self.fresh()}." for _ in range(n)]
        threads = [threading.Thread(target=lambda t=t: answers.append(chat(s, user(t), 96))) for t in texts]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.put(f"aggregate, {n} streams", "tok/s", s, 96 * n / (time.perf_counter() - begun))

    def copy(self, s: Server) -> None:
        """A file repeated with one change: what drafting from the prompt gains (start the peer with its own)."""
        body = {"prompt": prompt("copy", self.fresh()), "max_tokens": 320, "temperature": 0, "ignore_eos": True}
        self.put("copy-edit, one stream", "tok/s", s, stream(s.port, body).decode_tok_s)

    def four(self, s: Server) -> None:
        """4 streams."""
        self.streams(s, 4)

    def eight(self, s: Server) -> None:
        """8 streams."""
        self.streams(s, 8)

    def stall(self, s: Server) -> None:
        """A 3,000-token prompt beside a running stream: the stream's largest gap meanwhile, and the newcomer's TTFT."""
        answers: list[Answer] = []
        going = threading.Event()
        thread = threading.Thread(
            target=lambda: answers.append(
                stream(
                    s.port,
                    {
                        "messages": user(f"Long story {self.fresh()}"),
                        "max_tokens": 600,
                        "temperature": 0,
                        "ignore_eos": True,
                    },
                    on_token=lambda n: going.set() if n == _ALONE else None,
                )
            )
        )
        thread.start()
        going.wait(60)
        begun = time.perf_counter()
        second = chat(s, user(unique(610, self.fresh())), 4)
        ended = time.perf_counter()
        thread.join()
        meanwhile = answers[0].gaps_between(begun, ended)
        before = statistics.median(answers[0].gaps_s[: _ALONE - 10])
        self.put("stall: largest gap ÷ gap before", "×", s, max(meanwhile) / before)
        self.put("stall: newcomer's TTFT", "s", s, second.ttft_s)

    def warm(self, s: Server) -> None:
        """A 2,000-token prefix, then a new last turn, then the same again."""
        head = [{"role": "system", "content": f"{self.fresh()} {SYSTEM}"}, *user("First question?")]
        cold = chat(s, head, 8)
        time.sleep(0.3)
        turn = [*head[:1], *user("Second, other question?")]
        warm = chat(s, turn, 8)
        again = chat(s, turn, 8)
        self.put("warm turn ÷ cold TTFT", "×", s, warm.ttft_s / cold.ttft_s)
        self.put("identical prompt TTFT", "ms", s, again.ttft_s * 1000)
        self.put("cold TTFT of ~1,500 tokens", "s", s, cold.ttft_s)

    def thrash(self, s: Server) -> None:
        """Three chats sharing a system prompt, four growing turns each, a title request after every turn."""
        seen = Seen(self.tokens)
        system = {"role": "system", "content": f"{self.fresh()} {SYSTEM}"}
        chats = [[system, *user(f"I am person {i}. Hello!")] for i in range(3)]
        ttfts: list[float] = []
        for turn in range(4):
            for i, messages in enumerate(chats):
                answer = seen.ask(messages, partial(chat, s, messages, 24))
                if (turn, i) != (0, 0):
                    ttfts.append(answer.ttft_s)
                messages += [{"role": "assistant", "content": answer.text}, *user(f"And then, number {turn}?")]
                title = user("Write a title of three words for a chat.")
                seen.ask(title, partial(chat, s, title, 6))
        self.put("thrash: tokens prefilled twice", "tokens", s, seen.twice)
        self.put("thrash: mean TTFT after the first", "ms", s, 1000 * sum(ttfts) / len(ttfts))

    def crowded(self, s: Server) -> None:
        """A short chat's speed with 12,000 tokens of other conversations cached, against its speed before."""

        def speed() -> float:
            return statistics.median(chat(s, user(f"Tell a story. {self.fresh()}"), 64).decode_tok_s for _ in range(5))

        alone = speed()
        for _ in range(6):
            chat(s, user(unique(410, self.fresh())), 4)
        time.sleep(0.5)
        self.put("short chat beside 12,000 cached tokens ÷ before", "×", s, speed() / alone)

    def cancel(self, s: Server) -> None:
        """TTFT right after dropping a long generation, against an idle server's."""
        idle = chat(s, user(f"Hi {self.fresh()}"), 4).ttft_s
        stream(
            s.port,
            {"messages": user(f"Long {self.fresh()}"), "max_tokens": 2000, "temperature": 0, "ignore_eos": True},
            stop_after=10,
        )
        after = chat(s, user(f"Hi {self.fresh()}"), 4).ttft_s
        before = s.cpu_s()
        time.sleep(1.0)
        self.put("cancel: next TTFT ÷ idle TTFT", "×", s, after / idle)
        self.put("cancel: CPU burnt in the next second", "s", s, s.cpu_s() - before)

    def restart(self, s: Server) -> None:
        """The same 2,000-token prompt after a clean restart and after kill -9."""
        messages = [{"role": "system", "content": f"{self.fresh()} {SYSTEM}"}, *user("Question?")]
        cold = chat(s, messages, 8)
        time.sleep(1.0)
        for name, sig in (("restart", signal.SIGTERM), ("kill -9", signal.SIGKILL)):
            s.stop(sig)
            s.start()
            again = chat(s, messages, 8)
            self.put(f"{name}: TTFT ÷ cold", "×", s, again.ttft_s / cold.ttft_s)
            time.sleep(1.0)

    def rest(self, s: Server) -> None:
        """Idle CPU and resident memory."""
        before = s.cpu_s()
        time.sleep(2.0)
        self.put("idle CPU", "core", s, (s.cpu_s() - before) / 2.0)
        self.put("resident memory", "MB", s, s.rss_bytes() / 1e6)


@contextlib.contextmanager
def running(servers: list[Server]) -> Iterator[None]:
    """Both servers for the length of the block."""
    try:
        for s in servers:
            print(f"{s.name}: ready in {s.start():.2f} s", file=sys.stderr)
            chat(s, user("Warm up."), 4)
        yield
    finally:
        for s in servers:
            if s.process is not None and s.process.poll() is None:
                s.stop()


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--peer-args", default="")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="single,four,eight,stall,warm,thrash,crowded,cancel,restart,rest")
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    model = str(arguments.model or smollm2())
    threads = str(len(os.sched_getaffinity(0)))
    ports = free_port(), free_port()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LOCALLLM_CACHE_DIR"] = cache
        ours = Server("localllm", serve_command(model, ports[0], "--context", "16384", "--quiet"), ports[0])
        peer = Server(
            "llama-server",
            [
                str(arguments.peer), "-m", model, "--port", str(ports[1]), "-t", threads, "-c", "16384", "--jinja",
                *arguments.peer_args.split(),
            ],
            ports[1],
        )  # fmt: skip
        scenarios = Scenarios(llama_server_tokens(ports[1]))
        with running([peer, ours]):
            for i in range(arguments.rounds):
                for name in arguments.only.split(","):
                    for server in (peer, ours):
                        getattr(scenarios, name)(server)
                print(f"  round {i + 1}/{arguments.rounds}", file=sys.stderr)
    write(arguments.out, [table.report("llama-server") for table in scenarios.tables.values()])


if __name__ == "__main__":
    main()
