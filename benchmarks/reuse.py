"""No token is prefilled twice: after restarts, with a full cache, and with a chat larger than it.

    python -m benchmarks.reuse [--peer PATH/llama-server] [--only starts,full,bigline,restart]
                               [--model FILE] [--out FILE]

starts   six starts with one cache folder: in each a file is edited, then three chats with one
         system prompt take turns
full     20 rounds of three new chats, 0.2 GB of memory for the cache
bigline  a chat longer than the memory cache, a short request after it, the chat's next turn: tokens
         not found
restart  TTFT of a known prompt after a restart, clean and kill -9, compared with its cold TTFT
long     the same with some 20,000 tokens; only if named, because the starter model's context is
         shorter (gemma's is not)

The client counts the tokens that a prompt shares with any sequence that the server has computed, in
this start or before, minus the tokens that the server reports as cached. The exit code is 1 if a
bar is missed. llama-server stores nothing on disk, so it runs only in `full` and `bigline`, with
the same memory for its cache.

"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest.mock import patch

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import ProcessScenarios, Server
from localllm.bench.scenarios import SYSTEM, source_file, unseen_text, user
from localllm.bench.stream import BenchTarget, Messages, free_port
from localllm.bench.token_counts import Counter, Tokens, TokensRead, tokenized

_ANSWER_TOKENS = 24
_CHATS, _TURNS = 3, 4
_FULL_GB, _BIGLINE_GB, _BIGLINE_DISK_GB = 0.2, 0.06, 1
# About 6,000 tokens and 200. A word has about six tokens at first, and fewer on average.
_BIG_WORDS, _SHORT_WORDS = 1150, 40
_LONG_WORDS, _LONG_CONTEXT = 3600, 24576


def computed_tokens(target: BenchTarget) -> Tokens:
    """Return a function for the tokens of messages on `target` (ours or llama-server). If the last
    message is an answer, only computed tokens count: not the template's text after it, and not the
    answer's last token."""

    def tokens(messages: Messages) -> list[int]:
        answered = messages[-1]["role"] == "assistant"
        asked = messages[:-1] if answered else messages
        prompt = str(target.post(f"{target.root}/apply-template", {"messages": asked})["prompt"])
        if not answered:
            return tokenized(target, prompt)
        return tokenized(target, prompt + messages[-1]["content"])[:-1]

    return tokens


@dataclass
class Figures:
    """The figures of one scenario for each server, by start or by round. Each of ours may be at
    most `bar`."""

    title: str
    unit: str
    bar: float
    values: dict[str, list[float]] = field(default_factory=dict)

    def put(self, name: str, value: float) -> None:
        """Add a figure."""
        self.values.setdefault(name, []).append(value)
        print(
            f"  {self.title}, {name}: {value:.4g} {self.unit} (bar {self.bar:g})",
            file=sys.stderr,
            flush=True,
        )

    @property
    def missed(self) -> bool:
        """Return whether one of our figures is above the bar."""
        return max(self.values["localllm"]) > self.bar

    def tell(self) -> None:
        """Print all figures."""
        print(f"\n{self.title} (bar {self.bar:g} {self.unit}){': MISSED' if self.missed else ''}")
        for name, values in self.values.items():
            print(f"  {name:14} {'  '.join(f'{v:.4g}' for v in values)}")


@dataclass
class Bench:
    """The model, the peer if there is one, and the results."""

    model: str
    peer: Path | None
    starts: int
    rounds: int
    found: list[Figures] = field(default_factory=list)

    def figures(self, title: str, unit: str, bar: float) -> Figures:
        """Add a table."""
        self.found.append(Figures(title, unit, bar))
        return self.found[-1]

    @contextmanager
    def ours(self, context: int, **settings: object) -> Iterator[Server]:
        """Yield our server, not started yet, with separate folders and `settings` as LOCALLLM_…
        variables in its environment."""
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            names = {
                f"LOCALLLM_{name}_DIR": str(Path(folder) / name)
                for name in ("CONFIG", "DATA", "CACHE", "LOG")
            }
            names |= {f"LOCALLLM_{name.upper()}": str(value) for name, value in settings.items()}
            with patch.dict(os.environ, names):
                server = Server(
                    "localllm",
                    serve_command(self.model, port, "--context", str(context), "--quiet"),
                    port,
                )
                try:
                    yield server
                finally:
                    _stop(server)

    @contextmanager
    def peers(self, context: int, memory_gb: float) -> Iterator[list[Server]]:
        """Yield llama-server, not started yet, with this memory for its cache, or an empty list if
        there is no peer."""
        if self.peer is None:
            yield []
            return
        port, threads = free_port(), len(os.sched_getaffinity(0))
        options = (
            f"--port {port} -t {threads} -c {context} --jinja --cache-ram "
            f"{round(memory_gb * 1e9 / 2**20)}"
        )
        server = Server("llama-server", [str(self.peer), "-m", self.model, *options.split()], port)
        try:
            yield [server]
        finally:
            _stop(server)

    # --- scenarios --------------------------------------------------------------------------------

    def run_starts(self) -> None:
        """Each start has new chats and a new file. The system prompt is that of the first start."""
        figures = self.figures("tokens prefilled twice in each start", "tokens", 50)
        with self.ours(16384) as server:
            seen = TokensRead(computed_tokens(server.target))
            for start in range(self.starts):
                server.start()
                before = seen.twice
                files = "\n".join(source_file(start * 10 + i) for i in range(5))
                _ask(seen, server, user(f"Rename the first function of this file.\n{files}"))
                _take_turns(seen, server, SYSTEM, f"on day {start}")
                figures.put(server.name, seen.twice - before)
                server.stop()

    def run_full(self) -> None:
        """Each round has a new system prompt. One round needs about a quarter of the memory."""
        figures = self.figures(
            f"tokens prefilled twice in each round with {_FULL_GB} GB", "tokens", 200
        )
        ours = self.ours(16384, cache_ram_gb=_FULL_GB, cache_disk_gb=8)
        with ours as our, self.peers(16384, _FULL_GB) as peers:
            for server in [our, *peers]:
                server.start()
                seen = TokensRead(computed_tokens(server.target))
                for n in range(self.rounds):
                    before = seen.twice
                    _take_turns(seen, server, f"{n} {SYSTEM}", "here")
                    figures.put(server.name, seen.twice - before)
                server.stop()

    def run_bigline(self) -> None:
        """There are free cells for both requests, so only the last block of the chat (512 tokens)
        may be computed again."""
        figures = self.figures(
            f"tokens of a long chat not found, {_BIGLINE_GB} GB, after a short one", "tokens", 600
        )
        for disk_gb in (_BIGLINE_DISK_GB, 0):
            ours = self.ours(8192, cache_ram_gb=_BIGLINE_GB, cache_disk_gb=disk_gb)
            with ours as our, self.peers(8192, _BIGLINE_GB) as peers:
                for server in [our, *(peers if not disk_gb else [])]:
                    server.start()
                    figures.put(server.name, _not_found(server))
                    server.stop()

    def run_restart(self) -> None:
        """Measure as `bench --against` does, with one folder."""
        with self.ours(16384) as server:
            server.start()
            scenarios = ProcessScenarios(Counter(server.target), None)
            scenarios.servers = [server]
            for scenarios.round in range(3):
                for name in ("restart", "kill"):
                    scenarios.run(name, server.target)
            for title, table in scenarios.tables.items():
                # On a shared machine a single TTFT is unreliable.
                self.figures(f"{title}, median of 3", "×", 0.02).put(
                    server.name, table.median(server.name)
                )

    def run_long(self) -> None:
        """Measure cold, after a restart, and after a kill when everything was written."""
        figures = self.figures(
            "first token of a long prompt after a restart, and after kill -9", "× cold", 0.05
        )
        with self.ours(_LONG_CONTEXT) as server:
            server.start()
            messages = user(f"Read this: {unseen_text(_LONG_WORDS, 1)}")
            cold = server.target.chat(messages, 8)
            for how in (signal.SIGTERM, signal.SIGKILL):
                server.stop(how)
                server.start()
                again = server.target.chat(messages, 8)
                print(
                    f"  {cold.ttft_s:.1f} s cold, {again.ttft_s:.2f} s; {again.cached_tokens} "
                    "tokens cached",
                    file=sys.stderr,
                )
                figures.put(server.name, again.ttft_s / cold.ttft_s)


def _take_turns(seen: TokensRead, server: Server, system: str, where: str) -> None:
    """Run three chats with one system prompt, four growing turns each."""
    chats: list[Messages] = [
        [{"role": "system", "content": system}, *user(f"I am person {i} {where}. Hello!")]
        for i in range(_CHATS)
    ]
    for turn in range(_TURNS):
        for messages in chats:
            said = _ask(seen, server, messages)
            messages += [{"role": "assistant", "content": said}, *user(f"And then, number {turn}?")]


def _not_found(server: Server) -> int:
    """Return the tokens of a long chat that its next turn computed again after a short request."""
    seen = TokensRead(computed_tokens(server.target))
    messages = user(f"Read this: {unseen_text(_BIG_WORDS, 1)}")
    said = _ask(seen, server, messages)
    _ask(seen, server, user(f"Something else: {unseen_text(_SHORT_WORDS, 2)}"))
    before = seen.twice
    _ask(seen, server, [*messages, {"role": "assistant", "content": said}, *user("And now?")])
    return seen.twice - before


def _ask(seen: TokensRead, server: Server, messages: Messages) -> str:
    answer = server.target.chat(messages, _ANSWER_TOKENS)
    seen.add(messages, answer)
    return answer.text


def _stop(server: Server) -> None:
    if server.process is not None and server.process.poll() is None:
        server.stop()


def main() -> None:
    """Run and report. The exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, default=None)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="starts,full,bigline,restart")
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    bench = Bench(
        str(arguments.model or smollm2()), arguments.peer, arguments.starts, arguments.rounds
    )
    for name in arguments.only.split(","):
        getattr(bench, f"run_{name}")()
    for figures in bench.found:
        figures.tell()
    if arguments.out:
        told = [{**asdict(f), "missed": f.missed} for f in bench.found]
        Path(arguments.out).write_text(json.dumps(told, indent=1), encoding="utf-8")
    if any(f.missed for f in bench.found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
