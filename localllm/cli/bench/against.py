"""`localllm bench --against`: compare servers under the same load, including ours if a model is
named."""

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
    """Measure the servers at `urls`, preceded by `localllm serve` on `model` if one is named.

    `restarts`: a command per server that restarts it, or empty.
    `scenarios`: a list separated by commas; None for the default scenarios.

    Raises UsageError, or BackendError if a server does not answer.
    """
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
    """Run `localllm serve MODEL` in a process with its own cache inside the `with` block."""
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
    """Exit through the `finally` blocks, so that the server is stopped too."""
    sys.exit(128 + number)


def _wait(target: BenchTarget, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers.

    Raises BackendError if its process ends first; its error is then on stderr.
    """
    end_s = time.monotonic() + _STARTED_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise BackendError(
                f"localllm serve ended with exit code {process.returncode}",
                hint="its error message is printed above",
            )
        try:
            target.wait_ready(0.0)
            return
        except BackendError:
            time.sleep(0.05)
    raise BackendError(f"localllm serve was not ready within {_STARTED_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server with SIGTERM, so that it can save its data. Kill it if that takes too
    long."""
    process.terminate()
    try:
        process.wait(_STOPPED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
