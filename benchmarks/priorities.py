"""Waiting times of concurrent requests on one server, by their priority.

    python -m benchmarks.priorities [--only background|waits|warm] [--rounds 5] [--model FILE]

background  A stream alone, and with six requests at flex priority: the 95th percentile of its gaps
            and its first token. Bar: 1.3 times as long.
waits       A short request's first token, 20 times during a prompt of 6,000 tokens and during 16
            choices. Bar: 2 s.
warm        The first question after a start, with instructions of 6,000 tokens, prefilled with
            `--warm FILE` and without. Bar: 0.15 of the time.

"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, running
from benchmarks.rounds import interleave, report
from localllm.bench.ratio import RoundComparison
from localllm.bench.scenarios import unseen_text, user
from localllm.bench.stream import BenchTarget, free_port
from localllm.errors import LocalLLMError

_STREAM_TOKENS = 120
_BACKGROUND = 6
_TRIALS = 20
_INSTRUCTION_WORDS = 1200
_LONG_WORDS = 1200


@contextmanager
def _beside(work: Callable[[int], None], threads: int) -> Iterator[None]:
    """Call `work` with new numbers repeatedly in `threads` threads while the block runs."""
    over = threading.Event()

    def repeat(first: int) -> None:
        n = first
        while not over.is_set():
            try:
                work(n)
            except LocalLLMError:
                if not over.is_set():
                    raise
            n += threads

    started = [threading.Thread(target=repeat, args=[i]) for i in range(threads)]
    for thread in started:
        thread.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        over.set()
        for thread in started:
            thread.join()


def _body(text: str, n: int) -> dict[str, Any]:
    return {"messages": user(text), "max_tokens": n, "ignore_eos": True}


def background(target: BenchTarget, rounds: int) -> list[RoundComparison]:
    """Measure the stream's gaps and first token, alone and with background requests."""
    gaps = RoundComparison("95th percentile of the gaps of a stream", "s", "less")
    first = RoundComparison("first token of the stream", "s", "less")
    seeds = iter(range(10**6))

    def stream(name: str) -> None:
        answer = target.stream(_body(unseen_text(60, next(seeds)), _STREAM_TOKENS))
        gaps.add(name, statistics.quantiles(answer.gaps_s, n=20)[-1])
        first.add(name, answer.ttft_s)

    def title(n: int) -> None:
        target.stream({**_body(unseen_text(100, 500_000 + n), 24), "service_tier": "flex"})

    def crowd() -> None:
        with _beside(title, _BACKGROUND):
            stream("beside six")

    target.chat(user("hi"), 2)
    interleave(rounds, lambda: stream("alone"), crowd)
    return [gaps, first]


def waits(target: BenchTarget, trials: int) -> list[RoundComparison]:
    """Measure a short request's first token while others send expensive requests."""
    table = RoundComparison("first token of a short request", "s", "less")
    seeds = iter(range(10**6))

    def short(name: str) -> None:
        table.add(name, target.chat(user(unseen_text(8, next(seeds))), 4).ttft_s)

    def long_prompt(n: int) -> None:
        target.chat(user(unseen_text(_LONG_WORDS, 700_000 + n)), 2)

    def choices(n: int) -> None:
        body: dict[str, Any] = {
            "messages": user(unseen_text(30, 800_000 + n)),
            "n": 16,
            "max_tokens": 64,
        }
        target.post(f"{target.url}/chat/completions", body)

    for _ in range(trials):
        short("alone")
    for name, work in (("during a long prompt", long_prompt), ("during 16 choices", choices)):
        with _beside(work, 1):
            for _ in range(trials):
                short(name)
                time.sleep(0.3)
    return [table]


def warm(model: Path, rounds: int) -> list[RoundComparison]:
    """Measure the first question after a start, with instructions prefilled in advance and
    without."""
    table = RoundComparison("first token of the first question after a start", "s", "less")
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds):
            text = unseen_text(_INSTRUCTION_WORDS, 900 + i)
            file = Path(folder) / f"{i}.txt"
            file.write_text(text)
            for name, options in (("cold", []), ("warm", ["--warm", str(file)])):
                port = free_port()
                home = {"HOME": tempfile.mkdtemp(dir=folder)}
                command = serve_command(model, port, "--context", "8192", *options)
                server = Server(name, command, port, environment=home)
                with running([server]):
                    if options:
                        time.sleep(60)
                    messages = [{"role": "system", "content": text}, *user("hi")]
                    table.add(name, server.target.chat(messages, 2).ttft_s)
    return [table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["background", "waits", "warm"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=smollm2())
    options = parser.parse_args()
    tables: list[tuple[list[RoundComparison], str]] = []
    if options.only in (None, "background", "waits"):
        port = free_port()
        command = serve_command(options.model, port, "--context", "32768", "--parallel", "20")
        with running([Server("localllm", command, port)]) as [server]:
            if options.only != "waits":
                tables.append((background(server.target, options.rounds), "alone"))
            if options.only != "background":
                tables.append((waits(server.target, _TRIALS), "alone"))
    if options.only in (None, "warm"):
        tables.append((warm(options.model, options.rounds), "cold"))
    for found, first in tables:
        report(found, first)


if __name__ == "__main__":
    main()
