"""The emulated device over HTTP: tokens/s ÷ ideal with worker process, pipe and SSE.

python -m benchmarks step --http [--rounds 5] [--tokens 400] [--profile server|worker [--case
2.5/8/greedy]]

The result is compared with the same in process, and the cost of each process is measured. The
worker finds the device by its entry point, like any third-party backend. Waiting for it is real
sleeping. The client is one thread with raw sockets that counts events. Server, worker and client
share this machine's processors, unlike on a real device. So the table also has the time that each
computed and waited for a processor, per token. In process, time is virtual, and in a second
measurement real. The difference (sleep, cold caches, other programs) is not a cost of the pipe.

"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import ctypes
import json
import os
import pstats
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import psutil

from benchmarks.processes import empty_home
from benchmarks.step import BARS, SAMPLINGS, recorded, share_of_ideal
from localllm.bench.stream import free_port
from localllm.engine.messages import Sampling
from localllm_backends.backend_type import BackendType
from localllm_backends.contract import Backend, Declaration, LoadSpec
from tests.support.emulated_device import EmulatedDevice, HostClock, Rows, Speeds

_ROOT = Path(__file__).parent.parent
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TIMER_SLACK = 29  # prctl(2): PR_SET_TIMERSLACK
# Every stream gets this number of tokens before the measurement.
_FIRST = 20
_WHO = ("worker", "server", "client")


class SleepingClock(HostClock):
    """Real time. Waiting is sleeping, reduced by the usual delay of a sleep on this machine."""

    def __init__(self) -> None:
        super().__init__()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_TIMER_SLACK, 1000, 0, 0, 0)
        late: list[float] = []
        for _ in range(200):
            begun = time.perf_counter()
            time.sleep(1e-3)
            late.append(time.perf_counter() - begun - 1e-3)
        self.late_s = statistics.median(late)

    def now(self) -> float:
        return time.perf_counter()

    def until(self, moment_s: float) -> None:
        rest_s = moment_s - self.late_s - self.now()
        if rest_s > 0:
            time.sleep(rest_s)
        while self.now() < moment_s:
            pass


class Profiled(EmulatedDevice):
    """Prints a profile of its thread at the end."""

    def close(self) -> None:
        _told()


_profile = cProfile.Profile(time.thread_time)


def _told() -> None:
    _profile.disable()
    pstats.Stats(_profile, stream=sys.stderr).strip_dirs().sort_stats("tottime").print_stats(60)


class EmulatedType(BackendType):
    """Files that end in .emulated: JSON with a step's seconds, the file of the rows and the
    spelling of tokens."""

    declaration = Declaration("emulated", "Emulated", ("emulated",))

    def available(self) -> str | None:
        return None

    def accepts(self, path: str) -> bool:
        return path.endswith(".emulated")

    def vocabulary(self, path: str) -> list[bytes]:
        return [piece.encode("latin-1") for piece in json.loads(Path(path).read_bytes())["pieces"]]

    def load(self, spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> Backend:
        made = json.loads(Path(spec.path).read_bytes())
        pieces = self.vocabulary(spec.path)
        device = (Profiled if made["profile"] else EmulatedDevice)(
            np.load(made["rows"]), Speeds.flat(made["step_s"]), top=made["top"],
            clock=SleepingClock(),
            spell=pieces.__getitem__,
        )  # fmt: skip
        device.info = replace(device.info, chat_template=CHATML)
        if made["profile"]:
            _profile.enable()
        return device


backend_type = EmulatedType()


# --- the server -----------------------------------------------------------------------------------


async def serve(port: int, files: list[Path], *, profiled: bool) -> None:
    """Run `localllm serve` with emulated models, without planning, because they have no model
    files."""
    from localllm.engine.worker.client import WorkerOptions
    from localllm.engine.worker.supervisor import Supervisor
    from localllm.server.app import create_app
    from localllm.server.http.run import serve_on
    from localllm.server.http.settings import ServerSettings
    from localllm.server.http.sockets import bind
    from localllm.server.models.router import ModelRouter, ServedModel

    engine = {"headroom_bytes": 0, "cache_bytes": 2**20}
    models = [
        ServedModel(f.stem, Supervisor(WorkerOptions(LoadSpec(str(f)), "emulated", engine,
        log_path=f.with_suffix(".log"))))
        for f in files
    ]  # fmt: skip
    router, settings = ModelRouter(models), ServerSettings(port=port)
    app = create_app(router, settings=settings)
    if profiled:
        _profile.enable()
    running = asyncio.ensure_future(serve_on(app, bind("127.0.0.1", port), settings, quiet=True))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with suppress(asyncio.CancelledError):
        await running
    if profiled:
        _told()
    await router.close()


@contextmanager
def serving(
    home: Path, rows: Rows, spell: Callable[[int], bytes], top: int, profile: str
) -> Iterator[int]:
    """Yield the port of a server with one emulated model for each T, named after T."""
    np.save(home / "rows.npy", rows)
    point = home / "emulated-1.0.dist-info"
    point.mkdir()
    (point / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated\nVersion: 1.0\n")
    (point / "entry_points.txt").write_text(
        "[localllm.backends]\nemulated = benchmarks.step_http:backend_type\n"
    )
    pieces = [spell(token).decode("latin-1") for token in range(rows.shape[1])]
    files = [home / f"{step_ms:g}.emulated" for step_ms in BARS]
    for file, step_ms in zip(files, BARS, strict=True):
        made = {
            "step_s": step_ms / 1e3,
            "rows": str(home / "rows.npy"),
            "top": top,
            "pieces": pieces,
        }
        file.write_text(json.dumps({**made, "profile": profile == "worker"}))
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{_ROOT}"}
    command = [sys.executable, "-m", "benchmarks.step_http", "--serve", str(port), *map(str, files)]
    command += ["--profile", "server"] if profile == "server" else []
    process = subprocess.Popen(command, env=environment, cwd=_ROOT)
    try:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(30)
        if profile == "worker":
            print("\n".join(file.with_suffix(".log").read_text() for file in files))


# --- the client -----------------------------------------------------------------------------------


@dataclass
class Spent:
    """Nanoseconds that a process computed and waited for a processor (Linux's schedstat, all its
    threads)."""

    computed_ns: int = 0
    waited_ns: int = 0

    @classmethod
    def of(cls, *processes: psutil.Process) -> Spent:
        spent = cls()
        for task in (
            task for p in processes for task in Path(f"/proc/{p.pid}/task").glob("*/schedstat")
        ):
            computed, waited, _ = map(int, task.read_text().split())
            spent.computed_ns += computed
            spent.waited_ns += waited
        return spent


def ask(
    port: int, model: str, n: int, sampling: Sampling, n_tokens: int
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return the tokens/s of `n` streams together, from when all have begun until the first ends.
    Also return the µs per token that each process computed and waited for a processor."""
    spec = {
        k: v for k, v in asdict(sampling).items() if k in ("temperature", "top_k", "top_p", "min_p")
    }
    poll, socks = selectors.DefaultSelector(), {}
    for i in range(n):
        body = json.dumps({
            "model": model, "messages": [{"role": "user", "content": f"{i} and so on"}],
            "stream": True, "seed": i,
            "max_tokens": n_tokens, "cache_prompt": False,
            "stream_options": {"include_usage": True}, **spec,
        }).encode()  # fmt: skip
        sock = socks[i] = socket.create_connection(("127.0.0.1", port))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: "
            "application/json\r\n"
        )
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        poll.register(sock, selectors.EVENT_READ, i)
    events, tails = [0] * n, [b""] * n
    client = psutil.Process()
    (server,) = client.children()
    who = {"worker": server.children(), "server": [server], "client": [client]}
    begun_s = ended_s = 0.0
    begun_at = ended_at = 0
    before: dict[str, Spent] = {}
    after: dict[str, Spent] = {}
    left = n
    while left:
        for key, _ in poll.select(30.0):
            i = key.data
            data = key.fileobj.recv(65536)  # type: ignore[union-attr]
            events[i] += data.count(b"\n\n")
            tails[i] = (
                (tails[i] + data)[-2000:]
                if b"usage" in data or len(data) < 200 or tails[i]
                else tails[i]
            )
            if b"data: [DONE]" in tails[i] or not data:
                if not ended_s:
                    ended_s, ended_at = time.perf_counter(), sum(events)
                    after = {name: Spent.of(*processes) for name, processes in who.items()}
                poll.unregister(key.fileobj)
                left -= 1
        if not begun_s and min(events) >= _FIRST:
            before = {name: Spent.of(*processes) for name, processes in who.items()}
            begun_s, begun_at = time.perf_counter(), sum(events)
    for sock in socks.values():
        sock.close()
    counts = [re.search(rb'"completion_tokens": ?(\d+)', tail) for tail in tails]
    if not all(counts) or not begun_s:
        raise SystemExit(f"an answer did not end: {tails[0]!r}")
    # Events without text: the role, the end, the usage and [DONE]. An incomplete character waits
    # for the next event.
    per_event = sum(int(c[1]) for c in counts if c) / (sum(events) - 4 * n)
    n_window = (ended_at - begun_at) * per_event
    costs = {
        name: (
            (after[name].computed_ns - spent.computed_ns) / 1e3 / n_window,
            (after[name].waited_ns - spent.waited_ns) / 1e3 / n_window,
        )
        for name, spent in before.items()
    }
    return n_window / (ended_s - begun_s), costs


def main() -> None:
    """Measure and report the median of all rounds, with the cases in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--top", type=int, default=256)
    parser.add_argument("--profile", choices=("server", "worker"), default="")
    parser.add_argument("--case", default="", help="one alone, such as 2.5/8/greedy")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(
            serve(
                int(given.serve[0]),
                [Path(f) for f in given.serve[1:]],
                profiled=bool(given.profile),
            )
        )
        return
    cases = [(t, n, s) for t in BARS for n in (1, 8) for s in SAMPLINGS]
    cases = [c for c in cases if not given.case or given.case == f"{c[0]:g}/{c[1]}/{c[2]}"]
    found: dict[tuple[float, int, str], list[tuple[float, ...]]] = {case: [] for case in cases}
    rows, spell = recorded(given.vocabulary)
    with empty_home() as home, serving(home, rows, spell, given.top, given.profile) as port:
        sleeping = SleepingClock()
        for step_ms in BARS:
            ask(port, f"{step_ms:g}", 1, SAMPLINGS["greedy"], 40)
        for _ in range(given.rounds):
            for step_ms, n, name in cases:
                tok_s, costs = ask(port, f"{step_ms:g}", n, SAMPLINGS[name], given.tokens)
                shares = [tok_s * step_ms / 1e3 / n]
                for clock in (HostClock(), sleeping):
                    device = EmulatedDevice(
                        rows, Speeds.flat(step_ms / 1e3), top=given.top, clock=clock, spell=spell
                    )
                    shares.append(share_of_ideal(device, clock, n, SAMPLINGS[name], 200))
                found[step_ms, n, name].append((*shares, *(x for who in _WHO for x in costs[who])))
    print(
        "                           ÷ ideal: over  in process,           µs a token computed (+ "
        "waited for a processor)"
    )
    print(
        "T ms, streams, sampling     HTTP  in process  sleeping    less   "
        + "".join(f"{who:>16}" for who in _WHO)
    )
    for (step_ms, n, name), values in found.items():
        share, alone, asleep, *costs_us = map(statistics.median, zip(*values, strict=True))
        told = "".join(
            f"{a:9.0f} (+{b:4.0f})" for a, b in zip(costs_us[::2], costs_us[1::2], strict=True)
        )
        missed = "" if alone - share <= 0.03 else "missed"
        print(
            f"{step_ms:4} {n:3} {name:12} {share:11.3f} {alone:11.3f} {asleep:9.3f} "
            f"{alone - share:7.3f}   {told} {missed}"
        )


if __name__ == "__main__":
    main()
