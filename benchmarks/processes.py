"""Servers as child processes (start, stop, resource use), and the scenarios that need one."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from localllm.bench import against
from localllm.bench.against import ScenarioResult
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import MEANS, SYSTEM, Scenarios, unseen_text, user
from localllm.bench.stream import BenchTarget, Messages
from localllm.bench.token_counts import Counter, Tokens
from localllm.errors import BackendError

# On a busy machine, a start at the lowest priority takes minutes.
_READY_S, _STOPPED_S = 1_200.0, 30.0


@contextlib.contextmanager
def empty_home() -> Iterator[Path]:
    """Use a temporary folder for all files of localllm: settings, conversations, caches and logs,
    empty at first."""
    with tempfile.TemporaryDirectory() as name:
        for kind in ("CONFIG", "DATA", "CACHE", "LOG"):
            os.environ[f"LOCALLLM_{kind}_DIR"] = str(Path(name) / kind.lower())
        yield Path(name)


@dataclass
class Server:
    """One server process and its start command. `model`: the name in requests. `environment`:
    additions to this process's variables. `log`: the file for its output (None: no file). `key`:
    the key for clients. `ready_s`: the seconds of its last start."""

    name: str
    command: list[str]
    port: int
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    key: str = ""
    process: subprocess.Popen[bytes] | None = None
    ready_s: float = math.nan

    @property
    def target(self) -> BenchTarget:
        """Return the server as a target for a client."""
        return BenchTarget(
            self.name,
            f"http://127.0.0.1:{self.port}/v1",
            self.model,
            key=self.key,
            restart=self.restart,
        )

    def start(self) -> float:
        """Start it, and return the seconds until it answers one token. Raises BackendError with its
        last output if it does not."""
        begun = time.perf_counter()
        with contextlib.ExitStack() as stack:
            out = (
                subprocess.DEVNULL if self.log is None else stack.enter_context(self.log.open("ab"))
            )
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env={**os.environ, **self.environment}
            )
        while True:
            try:
                self.target.wait_ready(0.0)
                self.ready_s = time.perf_counter() - begun
                return self.ready_s
            except BackendError:
                if self.process.poll() is not None or time.perf_counter() - begun > _READY_S:
                    said = (
                        self.log.read_text(errors="replace")[-500:] if self.log is not None else ""
                    )
                    raise BackendError(f"{self.name} did not start: {said}") from None
            time.sleep(0.02)

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """End it and its children, and kill those that do not end in time."""
        assert self.process is not None
        all_of_it = self._processes()
        self.process.send_signal(sig)
        try:
            self.process.wait(timeout=_STOPPED_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(all_of_it, timeout=10)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def restart(self) -> None:
        """End it with SIGTERM, as a user would, and start it again."""
        self.stop()
        self.start()

    def rss_bytes(self) -> int:
        """Return the resident memory of server and workers, including file-backed pages as the
        kernel counts them."""
        return sum(p.memory_info().rss for p in self._processes())

    def cpu_s(self) -> float:
        """Return the CPU seconds of server and workers so far."""
        return sum(sum(p.cpu_times()[:2]) for p in self._processes())

    def _processes(self) -> list[psutil.Process]:
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


BURNT = RoundComparison("CPU burnt in the second after a cancel", "s", "less")
KILLED = RoundComparison("kill -9: first token ÷ cold", "×", "less")
CROWDED = RoundComparison("short chat beside 12,000 cached tokens", "× before", "more")
BURST = RoundComparison("burst of 32 short questions", "tok/s")
AGAIN_BURST = RoundComparison("the same burst once more", "tok/s")
BURST_FIRST = RoundComparison("burst of 32: last first token", "s", "less")
KNOWN = RoundComparison("{} known tokens, first token", "ms", "less")
KNOWN_CPU = RoundComparison("{} known tokens, processor", "ms", "less")
NEXT = RoundComparison("the next turn behind {} tokens, first token", "ms", "less")
FRESH = RoundComparison("the next turn on a fresh server, first token", "ms", "less")
IDLE = RoundComparison("CPU of a server at rest", "core", "less")
MEMORY = RoundComparison("resident memory", "MB", "less")


class ProcessScenarios(Scenarios):
    """Scenarios that need a process of ours, in addition to those for any server. `servers`: the
    servers of the targets."""

    means: Mapping[str, str] = {
        **MEANS,
        "crowded": "a short chat while much of others' is kept: does what is kept slow you down",
        "burnt": "you stop an answer: does the machine go on computing it",
        "kill": "the server is killed (power, memory): is an earlier conversation still cached",
        "burst": "32 people ask at the same moment, the first thing on a new server and again",
        "known": "a conversation of 2,000 and of 10,000 tokens comes once more, and goes on",
        "fresh": "the second question to a server that was just started",
        "rest": "nobody asks: what the server costs meanwhile",
    }
    servers: Sequence[Server] = ()

    def _server(self, t: BenchTarget) -> Server:
        return next(s for s in self.servers if s.name == t.name)

    def run_crowded(self, t: BenchTarget) -> None:
        """Compare a short chat's speed with 12,000 tokens of other conversations cached with its
        speed before."""

        def speed() -> float:
            return statistics.median(
                t.chat(user(f"Tell a story. {self.next_seed()}"), 64).decode_tok_s for _ in range(5)
            )

        alone = speed()
        for _ in range(6):
            t.chat(user(unseen_text(410, self.next_seed())), 4)
        time.sleep(0.5)
        self.record(CROWDED, t, speed() / alone)

    def run_burnt(self, t: BenchTarget) -> None:
        """Measure the CPU seconds in the second after a client left a long answer."""
        t.chat(user(f"Long {self.next_seed()}"), 2000, stop_after=10)
        t.chat(user(f"Hi {self.next_seed()}"), 4)
        server = self._server(t)
        before = server.cpu_s()
        time.sleep(1.0)
        self.record(BURNT, t, server.cpu_s() - before)

    def run_kill(self, t: BenchTarget) -> None:
        """Measure the same 1,400-token prompt after kill -9."""
        server = self._server(t)
        messages: Messages = [
            {"role": "system", "content": f"{self.next_seed()} {SYSTEM}"},
            *user("Question?"),
        ]
        cold = t.chat(messages, 8)
        time.sleep(1.0)
        server.stop(signal.SIGKILL)
        server.start()
        self.record(KILLED, t, t.chat(messages, 8).ttft_s / cold.ttft_s)
        time.sleep(1.0)

    def run_burst(self, t: BenchTarget) -> None:
        """Measure 32 questions at once, the first and the second time."""
        for figure in (BURST, AGAIN_BURST):
            begun = time.perf_counter()
            with ThreadPoolExecutor(32) as pool:
                asked = [
                    pool.submit(t.chat, user(f"Tell story {self.next_seed()}."), 48)
                    for _ in range(32)
                ]
                answers = [future.result() for future in asked]
            tokens = sum(self.counter.tokens_of(t, answer) for answer in answers)
            self.record(figure, t, tokens / (time.perf_counter() - begun))
            if figure is BURST:
                self.record(BURST_FIRST, t, max(answer.ttft_s for answer in answers))

    def run_known(self, t: BenchTarget) -> None:
        """Measure the first token and the processor time (including the model's step) of a known
        prompt, ten times, and the first token of the next turn."""
        server = self._server(t)
        for words in (400, 2000):
            head = user(unseen_text(words, self.next_seed()))
            answer = t.chat(head, 4)
            time.sleep(1.0)
            before = server.cpu_s()
            seconds = [t.chat(head, 1).ttft_s for _ in range(10)]
            # The system counts processor time in hundredths of a second.
            cpu_s = (server.cpu_s() - before) / len(seconds)
            said: Messages = [{"role": "assistant", "content": answer.text}, *user("And then?")]
            after = t.chat([*head, *said], 1).ttft_s
            measured = (statistics.median(seconds), cpu_s, after)
            for figure, value in zip((KNOWN, KNOWN_CPU, NEXT), measured, strict=True):
                named = replace(figure, title=figure.title.format(f"{words * 5:,}"))
                self.record(named, t, 1000 * value)

    def run_fresh(self, t: BenchTarget) -> None:
        """Measure the second turn of 2,000 tokens in a server's first minute."""
        self._server(t).restart()
        head = user(unseen_text(400, self.next_seed()))
        answer = t.chat(head, 8)
        said: Messages = [{"role": "assistant", "content": answer.text}, *user("And then?")]
        self.record(FRESH, t, 1000 * t.chat([*head, *said], 8).ttft_s)

    def run_rest(self, t: BenchTarget) -> None:
        """Measure idle CPU and resident memory."""
        server = self._server(t)
        before = server.cpu_s()
        time.sleep(2.0)
        self.record(IDLE, t, (server.cpu_s() - before) / 2.0)
        self.record(MEMORY, t, server.rss_bytes() / 1e6)


def put_through(servers: Sequence[Server], names: Sequence[str], rounds: int) -> ScenarioResult:
    """Run the scenarios `names` in turn on running servers, and return the results. Each step is
    printed on standard error."""

    def make(counter: Counter, tokens: Tokens | None) -> ProcessScenarios:
        scenarios = ProcessScenarios(counter, tokens)
        scenarios.servers = servers
        return scenarios

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return against.run([server.target for server in servers], names, rounds, say, make)


@contextlib.contextmanager
def running(servers: Sequence[Server]) -> Iterator[list[Server]]:
    """Yield the servers that start, for the duration of the block. SIGTERM ends it as Ctrl-C does.
    The reason of a failed start is printed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started: list[Server] = []
    try:
        for s in servers:
            try:
                print(f"{s.name}: ready in {s.start():.2f} s", file=sys.stderr, flush=True)
                started.append(s)
            except BackendError as e:
                print(f"left out: {e.message}", file=sys.stderr, flush=True)
        yield started
    finally:
        for s in servers:
            if s.process is not None and s.process.poll() is None:
                s.stop()
