"""Prefill on one server, decode on another: first token, and longest gap of a stream meanwhile.

    python -m benchmarks.transfer [--rounds 3] [--tokens 3000] [--links 1 2.5 10] [--model FILE]
        [--minutes 10] [--others 1]

Two servers of one build run on one core each. A relay limits the link to so many Gbit/s. In each
round and for each link, the prefill server reads a new prompt for itself. Then the decode server
has two prompts read there: alone, and while a stream decodes. Bars: the first token within 1.15
times max(computing there, bytes ÷ link), and no gap of the stream longer than 2 of its token times.

Two machines would share nothing, but two cores share caches and memory. And a token takes longer
the more tokens the stream has. So the stream's token time is the mean of two medians: before and
after the transfer, while the prefill server reads a prompt for itself. The longest gap of these
times is reported next to that of the transfer.

Other programs make both bars meaningless. A measurement counts only if they took at most the share
`--others` of the processors meanwhile. Otherwise it is repeated, until `--minutes` are over.
Processor time suffers less. The report has the prefill server's for a transfer, divided by that for
its own reading, and the decode server's.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.models import serve_command, smollm2
from benchmarks.processes import Server, empty_home, running
from localllm.bench.ratio import rotated
from localllm.bench.stream import free_port

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

_KEY = "decode-decode-decode"
_KEYS = '[keys.decode]\nenv = "DECODE_KEY"\nkv = true\n'
_GBIT_BYTES = 125_000_000
# In seconds. An answer sends a comment at least every 10 s.
_SILENCE_S = 60.0
# Tokens of the stream before the other server reads a prompt, and its maximum.
_WARM_TOKENS = 60
_STREAM_TOKENS = 8000
# Tokens of the answer that decodes with the stream.
_JOINED_TOKENS = 20
_KERNEL_KINDS = ("irq", "softirq", "steal")
# Run a command on one core.
_PINNED = (
    "import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.executable, sys.argv[1:])"
)


@dataclass
class Answer:
    """The times in seconds at which the pieces of an answer came, and its last comment, the receipt
    of its KV. It ends when `enough` is set, or with an error at `until_s`."""

    until_s: float
    began_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    receipt: str = ""
    enough: threading.Event = field(default_factory=threading.Event)

    @property
    def first_s(self) -> float:
        return self.times_s[0] - self.began_s

    def gaps_s(self, after_s: float, until_s: float) -> list[float]:
        """Return the times between two tokens that end after `after_s` and by `until_s`."""
        return [b - a for a, b in pairwise(self.times_s) if after_s < b <= until_s]


def ask(port: int, prompt: Sequence[int], n_tokens: int, answer: Answer) -> None:
    """Request `n_tokens`, and record in `answer` when each piece comes."""
    body: dict[str, Any] = {"prompt": [*prompt], "max_tokens": n_tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {_KEY}", "content-type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_SILENCE_S)) as connection:
        answer.began_s = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"port {port} answers {response.status}: {response.read(500)!r}")
        for line in response:
            if line.startswith(b": "):
                answer.receipt = line.decode().strip()
            if line.startswith(b'data: {"') and b'"text"' in line:
                answer.times_s.append(time.perf_counter())
            if answer.enough.is_set():
                return
            if time.perf_counter() > answer.until_s:
                raise TimeoutError("the time is over")


def prompts(n_tokens: int) -> Iterator[list[int]]:
    """Yield prompts with different beginnings."""
    for seed in count():
        yield [1000 + (seed * 7919 + i * 31) % 20_000 for i in range(n_tokens)]


@dataclass(frozen=True)
class Gaps:
    """The longest gaps of a stream in its own token times: while the prefill server reads prompts for
    itself (`control`), and while KV is imported (`importing`). `joined`: while both requests decode,
    in token times of these steps. One of these is `joined_token` of its own token times."""

    control: float
    importing: float
    joined: float
    joined_token: float

    @classmethod
    def of(cls, stream: Answer, controls: Sequence[Answer], streamed: Answer) -> Gaps:
        """Return the gaps of `stream` while the prefill server read `controls` for itself, and
        during the transfer for `streamed`."""
        first_s = streamed.times_s[0]
        last_s = streamed.times_s[-1]
        undisturbed = [stream.gaps_s(read.began_s, read.times_s[0]) for read in controls]
        token_s = statistics.fmean(map(statistics.median, undisturbed))
        joined_s = statistics.median(stream.gaps_s(first_s, last_s))
        # Both requests get a token of the first and the last joined step, in either order.
        imported_s = first_s - joined_s / 2
        ended_s = last_s + joined_s / 2
        return cls(
            max(max(gaps_s) / statistics.median(gaps_s) for gaps_s in undisturbed),
            max(stream.gaps_s(streamed.began_s, imported_s)) / token_s,
            max(stream.gaps_s(imported_s, ended_s)) / joined_s,
            joined_s / token_s,
        )


@dataclass(frozen=True)
class Transfer:
    """The measurements of one transfer.

    Seconds to the first token: of the prefill server for itself (`compute_s`), of the decode server
    (`first_s`), and of the decode server while a stream decodes (`streamed_s`). Processor seconds:
    of the prefill server for itself (`own_cpu_s`) and for the decode server (`there_cpu_s`), and of
    the decode server meanwhile (`here_cpu_s`). `gaps`: those of the stream. `others`: the share of
    the processors that other programs took.
    """

    compute_s: float
    own_cpu_s: float
    first_s: float
    there_cpu_s: float
    here_cpu_s: float
    n_bytes: int
    streamed_s: float
    gaps: Gaps
    others: float


@dataclass
class Link:
    """The measurements of a link of `gbit_s`."""

    gbit_s: float
    transfers: list[Transfer] = field(default_factory=list)

    def bound_s(self, transfer: Transfer) -> float:
        """Return the minimum seconds of computing there and of the link."""
        return max(transfer.compute_s, transfer.n_bytes / (self.gbit_s * _GBIT_BYTES))

    def line(self) -> str:
        if not self.transfers:
            return f"{self.gbit_s:4g} Gbit/s: not measured"
        ratios = [t.first_s / self.bound_s(t) for t in self.transfers]
        importing = [t.gaps.importing for t in self.transfers]
        joined = [t.gaps.joined for t in self.transfers]
        n_bytes = self.transfers[0].n_bytes

        def median(of: Callable[[Transfer], float]) -> float:
            return statistics.median(map(of, self.transfers))

        return (
            f"{self.gbit_s:4g} Gbit/s: {n_bytes / 1e6:.1f} MB take "
            f"{n_bytes / (self.gbit_s * _GBIT_BYTES):.2f} s, computing there "
            f"{median(lambda t: t.compute_s):.2f} s; first token {median(lambda t: t.first_s):.2f} s "
            f"= {_range(ratios)} × the longer one (bar 1.15); with a stream "
            f"{median(lambda t: t.streamed_s):.2f} s. Longest gap {_range(importing)} token "
            f"times (bar 2; {median(lambda t: t.gaps.control):.2f} without a transfer), then {_range(joined)} of both, each "
            f"{median(lambda t: t.gaps.joined_token):.2f} times as long. Processor there "
            f"{median(lambda t: t.there_cpu_s):.2f} s = {_range([*map(_cpu_ratio, self.transfers)])} × "
            f"its own reading, here {median(lambda t: t.here_cpu_s):.2f} s. Other programs took "
            f"{median(lambda t: t.others):.0%}"
        )


def _cpu_ratio(transfer: Transfer) -> float:
    return transfer.there_cpu_s / transfer.own_cpu_s


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}–{max(values):.3f}]"


@dataclass
class Pair:
    """The two servers and the relay between them."""

    there: Server
    here: Server
    relay: Any
    prompts: Iterator[list[int]]

    def measure(self, link: Link, until_s: float) -> Transfer:
        """Measure `link` once. Raises SystemExit if a prompt is not read there, and OSError if an
        answer comes too late or ends too early."""
        self.relay.rate_bytes_s = link.gbit_s * _GBIT_BYTES
        clock_s, taken_s = time.perf_counter(), self._taken_by_others_s()
        cpu_s = self.there.cpu_s()
        alone = Answer(until_s)
        ask(self.there.port, next(self.prompts), 1, alone)
        own_cpu_s = self.there.cpu_s() - cpu_s
        _say(f"{link.gbit_s:g} Gbit/s: computed there in {alone.first_s:.2f} s")
        passed, cpu_s, here_cpu_s = self.relay.passed_bytes, self.there.cpu_s(), self.here.cpu_s()
        answer = self._read_there(until_s)
        n_bytes = self.relay.passed_bytes - passed
        there_cpu_s, here_cpu_s = self.there.cpu_s() - cpu_s, self.here.cpu_s() - here_cpu_s
        _say(f"{link.gbit_s:g} Gbit/s: transferred in {answer.first_s:.2f} s")
        stream, controls, streamed = self._with_stream(until_s)
        taken_s = self._taken_by_others_s() - taken_s
        clock_s = time.perf_counter() - clock_s
        return Transfer(
            alone.first_s,
            own_cpu_s,
            answer.first_s,
            there_cpu_s,
            here_cpu_s,
            n_bytes,
            streamed.first_s,
            Gaps.of(stream, controls, streamed),
            taken_s / clock_s / len(os.sched_getaffinity(0)),
        )

    def _with_stream(self, until_s: float) -> tuple[Answer, Sequence[Answer], Answer]:
        """While a stream decodes here, have a prompt read there for here. Before and after that,
        one is read there for itself. Return the stream, the two answers there, and the one here."""
        stream = Answer(until_s)
        controls = [Answer(until_s), Answer(until_s)]
        streaming = threading.Thread(
            target=ask,
            args=[self.here.port, next(self.prompts)[:40], _STREAM_TOKENS, stream],
            daemon=True,
        )
        streaming.start()
        try:
            while len(stream.times_s) < _WARM_TOKENS and streaming.is_alive():
                time.sleep(0.01)
            ask(self.there.port, next(self.prompts), 1, controls[0])
            streamed = self._read_there(until_s, _JOINED_TOKENS)
            ask(self.there.port, next(self.prompts), 1, controls[1])
            if not streaming.is_alive():
                raise ConnectionError("the stream ended before the transfer")
        finally:
            stream.enough.set()
            streaming.join(_SILENCE_S)
        return stream, controls, streamed

    def _read_there(self, until_s: float, n_tokens: int = 1) -> Answer:
        answer = Answer(until_s)
        ask(self.here.port, next(self.prompts), n_tokens, answer)
        if "read by" not in answer.receipt:
            raise SystemExit(f"the prompt was not read there: {answer.receipt}")
        return answer

    def _taken_by_others_s(self) -> float:
        """Return the seconds of processor time that other programs and the hypervisor took so
        far."""
        times = psutil.cpu_times()
        busy_s = sum(times[:3]) + sum(getattr(times, kind, 0.0) for kind in _KERNEL_KINDS)
        return float(busy_s - self.there.cpu_s() - self.here.cpu_s() - time.process_time())


def _server(name: str, core: int, model: Path, home: Path, *options: str) -> Server:
    """Return a server on one core with a separate home."""
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


def measure(pair: Pair, links: Sequence[Link], options: argparse.Namespace) -> None:
    """Measure each link `options.rounds` times, until `options.minutes` are over. The first
    measurement does not count, because the servers learn their costs from it."""
    until_s = time.perf_counter() + 60 * options.minutes
    asked = count()
    learnt = False
    while time.perf_counter() < until_s:
        left = [link for link in links if len(link.transfers) < options.rounds]
        if not left:
            return
        link = rotated(left, next(asked))[0]
        try:
            found = pair.measure(link, until_s)
        except OSError as e:
            _say(f"{link.gbit_s:g} Gbit/s: {e}")
            continue
        counts = learnt and found.others <= options.others
        learnt = True
        if counts:
            link.transfers.append(found)
        _say(
            f"{link.gbit_s:g} Gbit/s: {found.first_s / link.bound_s(found):.3f} × "
            f"{link.bound_s(found):.2f} s, processor {_cpu_ratio(found):.3f} ×, longest gap "
            f"{found.gaps.importing:.2f} ({found.gaps.control:.2f}), others {found.others:.0%}{'' if counts else ': does not count'}"
        )


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Start the servers, measure, and end them."""
    from support.relay import relay_to

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--links", type=float, nargs="*", default=[1, 2.5, 10])
    parser.add_argument("--model", type=Path, default=smollm2())
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--others", type=float, default=1.0)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    links = [Link(gbit_s) for gbit_s in options.links]
    with empty_home() as home, tempfile.TemporaryDirectory() as folder:
        there = _server("prefill server", cores[-1], options.model, home)
        config = Path(there.environment["LOCALLLM_CONFIG_DIR"])
        config.mkdir(parents=True)
        (config / "config.toml").write_text(_KEYS, encoding="utf-8")
        there.log = Path(folder) / "there"
        with relay_to(there.port) as relay:
            asks = ("--prefill-from", relay.url, "--draft", "off")
            here = _server("decode server", cores[0], options.model, home, *asks)
            here.environment["LOCALLLM_PREFILL_FROM_TOKENS"] = "1024"
            here.log = Path(folder) / "here"
            with running([there, here]) as started:
                if len(started) < 2:
                    raise SystemExit("a server did not start")
                measure(Pair(there, here, relay, prompts(options.tokens)), links, options)
    print(f"{options.tokens:,} tokens, {options.rounds} rounds")
    for link in links:
        print(link.line())


if __name__ == "__main__":
    main()
