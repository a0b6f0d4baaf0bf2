"""Prefill there, decode here: the first token's time against the slower of computing and link, and
the longest gap of a stream meanwhile.

    python -m benchmarks.transfer [--rounds 3] [--tokens 3000] [--links 1 2.5 10] [--model FILE]

Two servers of one build, on one core each. A relay limits the link to so many Gbit/s. In each round,
the prefill server reads a new prompt alone, then the decode server has one read for each link: alone,
and while a stream decodes. Bars: the first token within 1.15 times max(computing there, bytes ÷ link),
and no gap of the stream longer than 2 of its token times.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home, running
from localllm.bench.ratio import rotated
from localllm.bench.stream import free_port

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

_KEY = "decode-decode-decode"
_KEYS = '[keys.decode]\nenv = "DECODE_KEY"\nkv = true\n'
_GBIT_BYTES = 125_000_000
_TIMEOUT_S = 120.0
# Tokens of the stream before the transfer begins, and at most.
_WARM_TOKENS = 60
_STREAM_TOKENS = 3000
# Runs a command on one core.
_PINNED = (
    "import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.executable, sys.argv[1:])"
)


@dataclass
class Answer:
    """The times at which the pieces of an answer came, in seconds, and the receipt of its KV."""

    began_s: float
    times_s: list[float] = field(default_factory=list)
    receipt: str = ""

    @property
    def first_s(self) -> float:
        return self.times_s[0] - self.began_s


def ask(port: int, prompt: Sequence[int], n_tokens: int, answer: Answer) -> None:
    """Ask for `n_tokens`, and note in `answer` when each piece comes."""
    body: dict[str, Any] = {"prompt": [*prompt], "max_tokens": n_tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {_KEY}", "content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    answer.began_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"port {port} answers {response.status}: {response.read(500)!r}")
    answer.receipt = response.headers.get("x-localllm-cache", "")
    for line in response:
        if line.startswith(b'data: {"') and b'"text"' in line:
            answer.times_s.append(time.perf_counter())
    connection.close()


def first_token(port: int, prompt: Sequence[int]) -> Answer:
    answer = Answer(0.0)
    ask(port, prompt, 1, answer)
    return answer


def prompts(n_tokens: int) -> Iterator[list[int]]:
    """Prompts that begin differently."""
    for seed in count():
        yield [1000 + (seed * 7919 + i * 31) % 20_000 for i in range(n_tokens)]


@dataclass
class Link:
    """What was measured over one link: first tokens in seconds, the bytes of a transfer, the longest
    gaps of a stream in its token times, and what failed."""

    gbit_s: float
    first_s: list[float] = field(default_factory=list)
    streamed_s: list[float] = field(default_factory=list)
    n_bytes: int = 0
    gaps: list[float] = field(default_factory=list)
    idle_gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, first_s: float, times_s: Sequence[float], begun: float, ended: float) -> None:
        """Add the first token of a transfer from `begun` to `ended`, and the stream meanwhile."""
        token_s = statistics.median(b - a for a, b in pairwise(times_s[:_WARM_TOKENS]))
        self.streamed_s.append(first_s)
        self.gaps.append(_longest([at for at in times_s if begun <= at <= ended]) / token_s)
        self.idle_gaps.append(_longest([at for at in times_s if at > ended]) / token_s)
        if times_s[-1] < ended:
            self.failures.append("the stream ended before the transfer")

    def line(self, compute_s: float) -> str:
        link_s = self.n_bytes / (self.gbit_s * _GBIT_BYTES)
        bound_s = max(compute_s, link_s)
        first_s = statistics.median(self.first_s)
        return (
            f"{self.gbit_s:4g} Gbit/s: {self.n_bytes / 1e6:.1f} MB take {link_s:.2f} s; first token "
            f"{first_s:.2f} s = {first_s / bound_s:.3f} × {bound_s:.2f} s (bar 1.15); with a stream "
            f"{statistics.median(self.streamed_s):.2f} s. Longest gap "
            f"{statistics.median(self.gaps):.2f} token times "
            f"[{min(self.gaps):.2f}–{max(self.gaps):.2f}] (bar 2); without a transfer "
            f"{statistics.median(self.idle_gaps):.2f}"
        )


def _longest(times_s: Sequence[float]) -> float:
    return max((b - a for a, b in pairwise(times_s)), default=0.0)


@dataclass
class Pair:
    """The two servers, and the relay between them."""

    there: Server
    here: Server
    relay: Any
    prompts: Iterator[list[int]]

    def transfer(self, link: Link) -> Answer:
        """Have a prompt read there."""
        self.relay.rate_bytes_s = link.gbit_s * _GBIT_BYTES
        before = self.relay.passed_bytes
        answer = first_token(self.here.port, next(self.prompts))
        link.n_bytes = self.relay.passed_bytes - before
        if "read by" not in answer.receipt:
            link.failures.append(answer.receipt)
        return answer

    def beside_a_stream(self, link: Link) -> None:
        """Have a prompt read there while a stream decodes here."""
        stream = Answer(0.0)
        asked = next(self.prompts)[:40]
        thread = threading.Thread(
            target=ask, args=[self.here.port, asked, _STREAM_TOKENS, stream], daemon=True
        )
        thread.start()
        while len(stream.times_s) < _WARM_TOKENS and thread.is_alive():
            time.sleep(0.01)
        begun = time.perf_counter()
        answer = self.transfer(link)
        ended = answer.times_s[-1]
        # As long again without a transfer.
        while time.perf_counter() < 2 * ended - begun and thread.is_alive():
            time.sleep(0.01)
        link.add(answer.first_s, stream.times_s, begun, ended)
        thread.join()


def _server(name: str, core: int, model: Path, home: Path, *options: str) -> Server:
    """A server on one core, with a home of its own."""
    port = free_port()
    command = serve_command(model, port, "--context", "12288", *options)
    pinned = [sys.executable, "-c", _PINNED.format(core=core), *command]
    folders = {
        f"LOCALLLM_{kind}_DIR": str(home / name / kind) for kind in ("CONFIG", "CACHE", "DATA")
    }
    environment = {
        **folders,
        "DECODE_KEY": _KEY,
        "LOCALLLM_THREADS": "1",
        "LOCALLLM_PREFILL_KEY": _KEY,
    }
    return Server(name, pinned, port, environment=environment, key=_KEY)


def measure(pair: Pair, links: Sequence[Link], rounds: int) -> float:
    """Fill `links`, and return the median time in which the prefill server reads a prompt."""
    compute_s = []
    for _ in range(2):  # learns the costs
        pair.transfer(Link(10))
    for number in range(rounds):
        for link in rotated(links, number):
            compute_s.append(first_token(pair.there.port, next(pair.prompts)).first_s)
            link.first_s.append(pair.transfer(link).first_s)
            pair.beside_a_stream(link)
        print(f"  round {number + 1}/{rounds}", file=sys.stderr)
    return statistics.median(compute_s)


def main() -> None:
    """Start the servers, measure, and end them."""
    from support.relay import relay_to

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--links", type=float, nargs="*", default=[1, 2.5, 10])
    parser.add_argument("--model", type=Path, default=smollm2())
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with empty_home() as home, tempfile.TemporaryDirectory() as folder:
        there = _server("prefill server", cores[-1], options.model, home)
        config = Path(there.environment["LOCALLLM_CONFIG_DIR"])
        config.mkdir(parents=True)
        (config / "config.toml").write_text(_KEYS, encoding="utf-8")
        there.log = Path(folder) / "there"
        with relay_to(there.port) as relay:
            asks = ("--prefill-from", relay.url)
            here = _server("decode server", cores[0], options.model, home, *asks)
            here.environment["LOCALLLM_PREFILL_FROM_TOKENS"] = "1024"
            here.log = Path(folder) / "here"
            with running([there, here]) as started:
                if len(started) < 2:
                    raise SystemExit("a server did not start")
                pair = Pair(there, here, relay, prompts(options.tokens))
                links = [Link(gbit_s) for gbit_s in options.links]
                compute_s = measure(pair, links, options.rounds)
    print(f"{options.tokens:,} tokens, {options.rounds} rounds; computing there {compute_s:.2f} s")
    for link in links:
        print(link.line(compute_s))
        for failure in link.failures:
            print(f"    not as intended: {failure}")


if __name__ == "__main__":
    main()
