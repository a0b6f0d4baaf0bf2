"""A server is killed and restarted on a socket that another process holds open, like systemd.

No client is refused, and the conversation continues with the cached KV.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform == "win32", reason="no descriptors are handed over there"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
_SERVE = (
    "import os; os.environ['LISTEN_PID'] = str(os.getpid());"
    "from localllm.cli.main import run; run(['serve', 'smollm2-135m-instruct', '--quiet', "
    "'--only'])"
)


@contextmanager
def server(sock: socket.socket) -> Iterator[subprocess.Popen[bytes]]:
    """Run `localllm serve` on `sock`, which stays open in this process."""
    environment = {**os.environ, "LISTEN_FDS": "1", "LOCALLLM_PORT": str(sock.getsockname()[1])}
    started = subprocess.Popen(
        [sys.executable, "-c", _SERVE], env=environment, pass_fds=[3],
        preexec_fn=lambda: os.dup2(sock.fileno(), 3)
    )  # fmt: skip
    try:
        yield started
    finally:
        started.terminate()
        started.wait(60)


def ask(sock: socket.socket, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """Return the answer, the tokens of the prompt, and how many of them were cached."""
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/chat/completions"
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    reply = httpx.post(url, json=body, timeout=240)
    said: dict[str, Any] = reply.raise_for_status().json()
    usage = said["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return said["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def test_kill_9_and_restart_lose_no_part_of_a_conversation() -> None:
    facts = " ".join(f"Fact {n}: {n} times seven is {n * 7}." for n in range(40))
    talk: list[dict[str, str]] = []
    with socket.create_server(("127.0.0.1", 0)) as sock, ThreadPoolExecutor(1) as pool:

        def turn(question: str, known: bool, how_it_ends: signal.Signals) -> None:
            """Send one turn while no server runs, and end the server that answers it.

            The request waits for this server, which gets the signal `how_it_ends`.
            """
            talk.append({"role": "user", "content": question})
            asked = pool.submit(ask, sock, [*talk])
            with server(sock) as running:
                answer, n_prompt, n_cached = asked.result(240)
                # Only the question and the template's text after the answer are new.
                assert n_cached >= n_prompt - 24 if known else n_cached == 0
                talk.append({"role": "assistant", "content": answer})
                workers = psutil.Process(running.pid).children(recursive=True)
                running.send_signal(how_it_ends)
                running.wait(60)
            assert len(psutil.wait_procs(workers, timeout=60)[0]) == len(workers) > 0

        turn(f"{facts} What is fact 3?", False, signal.SIGKILL)
        turn("And fact 4?", True, signal.SIGTERM)
        turn("And fact 5?", True, signal.SIGKILL)
