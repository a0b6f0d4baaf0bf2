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

_OWN_NAME = "localllm"
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0


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
        names = against.parse_scenarios(scenarios)
    else:
        names = [*DEFAULT]
        if restarts:
            names.append("restart")
    key = Settings().value("api_key") or ""
    commands: Sequence[str | None] = restarts or [None] * len(urls)
    targets = []
    for url, command in zip(urls, commands, strict=True):
        targets.append(against.target_of(url, key, command))

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if model is None:
        return against.run(targets, names, rounds, report)
    with own_server(model, key) as own:
        return against.run([own, *targets], names, rounds, report)


@contextmanager
def own_server(model: str, key: str) -> Iterator[BenchTarget]:
    """Run `localllm serve MODEL` in a process with its own cache inside the `with` block."""
    port = free_port()
    command = [sys.executable, "-m", "localllm", "serve", model, "--quiet"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="localllm-bench-") as cache_folder:
        environment = {**os.environ, "LOCALLLM_CACHE_DIR": cache_folder}
        processes: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment))
            _wait_until_ready(target, processes[-1])

        def restart() -> None:
            _stop(processes.pop())
            start()

        target = BenchTarget(_OWN_NAME, f"http://127.0.0.1:{port}/v1", key=key, restart=restart)
        signal.signal(signal.SIGTERM, _exit)
        try:
            start()
            yield target
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for process in processes:
                _stop(process)


def _exit(signal_number: int, _frame: object) -> None:
    """Exit through the `finally` blocks, so that the server is stopped too."""
    sys.exit(128 + signal_number)


def _wait_until_ready(target: BenchTarget, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers.

    Raises BackendError if its process ends first; its error is then on stderr.
    """
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
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
    raise BackendError(f"localllm serve was not ready within {_START_TIMEOUT_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server with SIGTERM, so that it can save its data. Kill it if that takes too
    long."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
