"""The program runs without the names that only POSIX has, as on Windows. The tests simulate this
with windows_like/sitecustomize.py, and have never run on Windows. Every module can be imported, the
commands answer, and a chat and a server run with their workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from support.until import until

LIKE_WINDOWS = Path(__file__).parent / "windows_like"
_IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("localllm", "localllm_tui", "localllm_catalog", "localllm_backends"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        if not module.name.endswith("__main__") and ".mlx" not in module.name:
            importlib.import_module(module.name)
import localllm.cli.serve.run as probe
import os
assert os.name == "posix" and probe.__name__
"""


def environment() -> dict[str, str]:
    """Return this environment with the simulation first on the path, and the encoding of a Western
    Windows console."""
    paths = [str(LIKE_WINDOWS), *(p for p in sys.path if p)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "cp1252"}


def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command with `text` on its standard input."""
    return subprocess.run(
        [sys.executable, *words], env=environment(), input=text, capture_output=True, text=True,
        encoding="cp1252", check=False,
        timeout=280,
    )  # fmt: skip


def test_the_windows_simulation_affects_only_our_packages() -> None:
    done = run(
        "-c",
        "import localllm.cli.serve.running as us; import os; print(us.os.name, "
        "hasattr(us.os, "
        "'getuid'), os.name)",
    )
    assert done.stdout.split() == ["nt", "False", "posix"], done.stderr


def test_every_module_can_be_imported() -> None:
    done = run("-c", _IMPORT_ALL)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        "config",
        "licences",
        "models",
        "cache",
        "recommend --device RTX4090",
        "service install --dry-run",
        "setup --list",
    ],
)
def test_commands_work_on_simulated_windows(words: str, tmp_path: Path) -> None:
    done = run("-m", "localllm", *words.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "service" in words:
        assert "LogonTrigger" in done.stdout


def test_a_unix_socket_is_refused_with_a_message() -> None:
    done = run("-m", "localllm", "serve", "smollm2-135m-instruct", "--unix", "here.sock")
    assert (done.returncode, "has no Unix sockets" in done.stderr) == (2, True), done.stderr


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.long
def test_a_chat_and_a_server_run_with_workers_on_simulated_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A small model may generate without end, so the context limits it.
    monkeypatch.setenv("LOCALLLM_CONTEXT", "256")
    answer = run(
        "-m",
        "localllm",
        "chat",
        "-m",
        "smollm2-135m-instruct",
        "Say hello in Chinese, with a smile.",
    )
    assert answer.returncode == 0 or "context" in answer.stderr, answer.stderr
    assert answer.stdout.strip()
    log = tmp_path / "serve.log"
    server = [
        sys.executable,
        "-m",
        "localllm",
        "service",
        "run",
        "--log",
        str(log),
        "smollm2-135m-instruct",
    ]
    with subprocess.Popen(server, env={**environment(), "LOCALLLM_PORT": "11977"}) as started:
        try:
            until(
                lambda: started.poll() is not None or answers("http://127.0.0.1:11977/health"),
                timeout_s=120,
            )
            assert started.poll() is None, log.read_text()
            body = json.dumps(
                {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
            ).encode()
            request = urllib.request.Request(
                "http://127.0.0.1:11977/v1/chat/completions",
                body,
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=200) as reply:
                assert json.load(reply)["choices"][0]["message"]["content"]
        finally:
            started.kill()
    assert "serving on" in log.read_text("utf-8")
