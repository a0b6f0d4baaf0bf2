"""Servers as processes of ours: started, killed, and looked at from outside; and what can only be
measured so."""

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
from localllm.bench.scenarios import MEANS, SYSTEM, Scenarios, unique, user
from localllm.bench.stream import BenchTarget, Messages
from localllm.bench.token_counts import Counter, Tokens
from localllm.errors import BackendError

# A start at the lowest priority of a busy machine takes minutes.
_READY_S, _STOPPED_S = 1_200.0, 30.0


@contextlib.contextmanager
def empty_home() -> Iterator[Path]:
    """A folder that everything of localllm's lies in from now on: settings, conversations, caches
    and logs of nobody."""
    with tempfile.TemporaryDirectory() as name:
        for kind in ("CONFIG", "DATA", "CACHE", "LOG"):
            os.environ[f"LOCALLLM_{kind}_DIR"] = str(Path(name) / kind.lower())
        yield Path(name)


@dataclass
class Server:
    """One server process and how to start it again. `model`: what requests name; `environment`:
    beside this process's own; `log`: the file its output goes to (None: nowhere); `key`: what it
    wants of clients; `ready_s`: seconds that its last start took."""

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
        """As a client meets it."""
        return BenchTarget(
            self.name,
            f"http://127.0.0.1:{self.port}/v1",
            self.model,
            key=self.key,
            restart=self.restart,
        )

    def start(self) -> float:
        """Start it; seconds until it answers one token. Raises BackendError where it does not, with
        its last words."""
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
        """End it and its children; what has not ended in time is killed."""
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
        """End it as a person would, and start it again."""
        self.stop()
        self.start()

    def rss_bytes(self) -> int:
        """Resident memory of server and workers, file-backed pages included as the kernel counts
        them."""
        return sum(p.memory_info().rss for p in self._processes())

    def cpu_s(self) -> float:
        """CPU seconds of server and workers so far."""
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
    """What can be measured of a process that we started, beside what every server can be put
    through. `servers`: those that the targets are of."""

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
        """A short chat's speed with 12,000 tokens of other conversations cached, against its speed
        before."""

        def speed() -> float:
            return statistics.median(
                t.chat(user(f"Tell a story. {self.fresh()}"), 64).decode_tok_s for _ in range(5)
            )

        alone = speed()
        for _ in range(6):
            t.chat(user(unique(410, self.fresh())), 4)
        time.sleep(0.5)
        self.put(CROWDED, t, speed() / alone)

    def run_burnt(self, t: BenchTarget) -> None:
        """CPU seconds in the second after a long answer was dropped."""
        t.chat(user(f"Long {self.fresh()}"), 2000, stop_after=10)
        t.chat(user(f"Hi {self.fresh()}"), 4)
        server = self._server(t)
        before = server.cpu_s()
        time.sleep(1.0)
        self.put(BURNT, t, server.cpu_s() - before)

    def run_kill(self, t: BenchTarget) -> None:
        """The same 1,400-token prompt after kill -9."""
        server = self._server(t)
        messages: Messages = [
            {"role": "system", "content": f"{self.fresh()} {SYSTEM}"},
            *user("Question?"),
        ]
        cold = t.chat(messages, 8)
        time.sleep(1.0)
        server.stop(signal.SIGKILL)
        server.start()
        self.put(KILLED, t, t.chat(messages, 8).ttft_s / cold.ttft_s)
        time.sleep(1.0)

    def run_burst(self, t: BenchTarget) -> None:
        """32 questions at once, first and second time."""
        for figure in (BURST, AGAIN_BURST):
            begun = time.perf_counter()
            with ThreadPoolExecutor(32) as pool:
                asked = [
                    pool.submit(t.chat, user(f"Tell story {self.fresh()}."), 48) for _ in range(32)
                ]
                answers = [future.result() for future in asked]
            tokens = sum(self.counter.tokens_of(t, answer) for answer in answers)
            self.put(figure, t, tokens / (time.perf_counter() - begun))
            if figure is BURST:
                self.put(BURST_FIRST, t, max(answer.ttft_s for answer in answers))

    def run_known(self, t: BenchTarget) -> None:
        """First token and processor time (the model's step included) of a prompt that is known, of
        ten, and the first token of the turn after it."""
        server = self._server(t)
        for words in (400, 2000):
            head = user(unique(words, self.fresh()))
            answer = t.chat(head, 4)
            time.sleep(1.0)
            before = server.cpu_s()
            seconds = [t.chat(head, 1).ttft_s for _ in range(10)]
            # The system counts in hundredths of a second.
            cpu_s = (server.cpu_s() - before) / len(seconds)
            said: Messages = [{"role": "assistant", "content": answer.text}, *user("And then?")]
            after = t.chat([*head, *said], 1).ttft_s
            measured = (statistics.median(seconds), cpu_s, after)
            for figure, value in zip((KNOWN, KNOWN_CPU, NEXT), measured, strict=True):
                named = replace(figure, title=figure.title.format(f"{words * 5:,}"))
                self.put(named, t, 1000 * value)

    def run_fresh(self, t: BenchTarget) -> None:
        """The second turn of 2,000 tokens in a server's first minute."""
        self._server(t).restart()
        head = user(unique(400, self.fresh()))
        answer = t.chat(head, 8)
        said: Messages = [{"role": "assistant", "content": answer.text}, *user("And then?")]
        self.put(FRESH, t, 1000 * t.chat([*head, *said], 8).ttft_s)

    def run_rest(self, t: BenchTarget) -> None:
        """Idle CPU and resident memory."""
        server = self._server(t)
        before = server.cpu_s()
        time.sleep(2.0)
        self.put(IDLE, t, (server.cpu_s() - before) / 2.0)
        self.put(MEMORY, t, server.rss_bytes() / 1e6)


def put_through(servers: Sequence[Server], names: Sequence[str], rounds: int) -> ScenarioResult:
    """What the scenarios `names` found of servers that run, in turn; each step is told on standard
    error."""

    def make(counter: Counter, tokens: Tokens | None) -> ProcessScenarios:
        scenarios = ProcessScenarios(counter, tokens)
        scenarios.servers = servers
        return scenarios

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return against.run([server.target for server in servers], names, rounds, say, make)


@contextlib.contextmanager
def running(servers: Sequence[Server]) -> Iterator[list[Server]]:
    """Those of them that start, for the length of the block, which SIGTERM ends as Ctrl-C does; why
    others did not is said."""
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
