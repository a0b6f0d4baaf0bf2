"""`localllm bench --against`: servers compared under the same load, ours among them where a model
is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from localllm.bench import against
from localllm.bench.scenarios import DEFAULT
from localllm.bench.stream import BenchTarget, free_port
from localllm.errors import BackendError, UsageError
from localllm.settings import Settings

_OURS = "localllm"
_STARTED_S = 300.0
_STOPPED_S = 30.0


def compare(
    model: str | None,
    urls: Sequence[str],
    restarts: Sequence[str],
    scenarios: str | None,
    rounds: int,
) -> against.ScenarioResult:
    """Measure the servers at `urls`, with a command for each that starts it again, or none, and
    before them `localllm serve` on `model` if one is named. `scenarios`: a list with commas, None
    for the usual ones. Raises UsageError, and BackendError where one does not answer."""
    if restarts and len(restarts) != len(urls):
        raise UsageError(
            f"{len(restarts)} --restart-cmd for {len(urls)} --against",
            hint="give one for each, in order",
        )
    if scenarios:
        names = against.chosen(scenarios)
    else:
        names = [*DEFAULT]
        if restarts:
            names.append("restart")
    key = Settings().value("api_key") or ""
    commands: Sequence[str | None] = restarts or [None] * len(urls)
    others = []
    for url, command in zip(urls, commands, strict=True):
        others.append(against.target_of(url, key, command))

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if model is None:
        return against.run(others, names, rounds, report)
    with own_server(model, key) as ours:
        return against.run([ours, *others], names, rounds, report)


@contextmanager
def own_server(model: str, key: str) -> Iterator[BenchTarget]:
    """`localllm serve MODEL` in a process of its own, with a cache of its own, for as long as the
    block runs."""
    port = free_port()
    command = [sys.executable, "-m", "localllm", "serve", model, "--quiet"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="localllm-bench-") as cache:
        environment = {**os.environ, "LOCALLLM_CACHE_DIR": cache}
        running: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment))
            _wait(target, running[-1])

        def restart() -> None:
            _stop(running.pop())
            start()

        target = BenchTarget(_OURS, f"http://127.0.0.1:{port}/v1", key=key, restart=restart)
        signal.signal(signal.SIGTERM, _exit)
        try:
            start()
            yield target
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for process in running:
                _stop(process)


def _exit(number: int, _frame: object) -> None:
    """End by way of the `finally` blocks, so that the server ends too."""
    sys.exit(128 + number)


def _wait(target: BenchTarget, process: subprocess.Popen[bytes]) -> None:
    """Until it answers; raises BackendError once it has ended, its own words being on stderr."""
    end_s = time.monotonic() + _STARTED_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise BackendError(
                f"localllm serve ended with exit code {process.returncode}", hint="see above"
            )
        try:
            target.wait_ready(0.0)
            return
        except BackendError:
            time.sleep(0.05)
    raise BackendError(f"localllm serve was not ready within {_STARTED_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it as a person would; it writes what it knows."""
    process.terminate()
    try:
        process.wait(_STOPPED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
