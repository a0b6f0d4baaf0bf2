"""SIGTERM to the whole process group, as a service manager sends it.

Streams end properly, the worker writes its KV to disk, and requests after the restart reuse it.
A worker without its parent also ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from starlette.applications import Starlette

from localllm.server.http import run
from localllm.server.http.settings import ServerSettings
from support.http_server import running_server
from support.scripted_engine import Gate, ScriptedEngine

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="process groups and signals of POSIX"
)

PROMPT = " ".join(f"Item {i} of the inventory is a lamp with {i * 7} lenses." for i in range(40))


@contextmanager
def serving(model: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Run `localllm serve` in its own process group, and yield it with a client."""
    command = [
        sys.executable,
        "-m",
        "localllm",
        "serve",
        str(model),
        "--port",
        "0",
        "--context",
        "2048",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stderr is not None
        said = ""
        for said in process.stderr:
            if said.startswith("serving on"):
                break
        url = said.split()[2].removesuffix("/v1")
        with httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
            yield process, client
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def ask(n: int) -> dict[str, object]:
    return {"prompt": PROMPT, "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip


def frames(reply: httpx.Response) -> Iterator[dict[str, object]]:
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def cached_of(client: httpx.Client) -> tuple[int, int]:
    """Return (cached tokens, prompt tokens)."""
    usage = client.post("/v1/completions", json={**ask(4), "stream": False}).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def test_terminating_the_group_ends_streams_cleanly_and_keeps_their_kv(
    few_layers: Path,
) -> None:
    with serving(few_layers) as (process, client):
        with client.stream("POST", "/v1/completions", json=ask(20)) as reply:
            told = frames(reply)
            next(told)
            os.killpg(process.pid, signal.SIGTERM)
            rest = list(told)
        assert not [f for f in rest if "error" in f]
        assert [c["finish_reason"] for f in rest for c in f["choices"] if c["finish_reason"]] == [
            "length"
        ]
        assert process.wait(timeout=60) == 0
    with serving(few_layers) as (_, client):
        cached, prompt = cached_of(client)
    assert cached >= prompt - 32, (cached, prompt)


def await_refusal(client: httpx.Client) -> None:
    """Wait until the server accepts no connection."""
    while True:
        try:
            client.get("/health", headers={"Connection": "close"})
        except httpx.TransportError:
            return


def test_a_second_signal_ends_streams_at_once_with_the_reason(few_layers: Path) -> None:
    """Service managers and `timeout` send SIGTERM and then another signal."""
    with serving(few_layers) as (process, client):
        with client.stream("POST", "/v1/completions", json=ask(1800)) as reply:
            told = frames(reply)
            next(told)
            process.send_signal(signal.SIGTERM)
            await_refusal(client)
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            *_, last = told
        assert "the server is stopping" in str(last["error"])
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_second_cancellation_lets_an_idle_server_close_its_sockets() -> None:
    faults: list[object] = []

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        sock = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(run.serve_on(Starlette(), [sock], ServerSettings()))
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.get(f"http://127.0.0.1:{sock.getsockname()[1]}/")
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        assert task.cancelled()

    asyncio.run(serve())
    gc.collect()  # an unread exception of a task is reported when the task is freed
    assert faults == []


def test_a_stream_cut_at_shutdown_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that is cut at shutdown tells its client the reason.

    The log of a service that restarts gets one line, not a traceback of forty calls.
    """
    monkeypatch.setattr(run, "GRACE_S", 1)
    never = Gate()
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with ExitStack() as stack:
        server = stack.enter_context(
            running_server({"tiny": ScriptedEngine(script=["Hello", never])}, quiet=False)
        )
        client = stack.enter_context(httpx.Client(base_url=server.url, trust_env=False, timeout=30))
        reply = stack.enter_context(client.stream("POST", "/v1/chat/completions", json=body))
        lines = reply.iter_lines()
        assert any("Hello" in line for line in lines)
        server.stop()
        rest = [line for line in lines if line.startswith("data: ")]
    assert "503 server_busy: the server is stopping" in rest[0]  # clients then retry
    assert rest[-1] == "data: [DONE]"
    assert [r.getMessage() for r in caplog.records if r.exc_info] == []


def test_terminating_the_group_after_an_answer_keeps_its_kv(few_layers: Path) -> None:
    with serving(few_layers) as (process, client):
        assert client.post("/v1/completions", json={**ask(8), "stream": False}).status_code == 200
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    with serving(few_layers) as (_, client):
        cached, prompt = cached_of(client)
    assert cached >= prompt - 32, (cached, prompt)


def test_a_worker_whose_server_is_killed_during_an_answer_writes_its_kv_and_exits(
    few_layers: Path,
) -> None:
    with serving(few_layers) as (process, client):
        [worker] = [
            p
            for p in psutil.Process(process.pid).children()
            if "localllm.engine.worker.worker" in p.cmdline()
        ]
        with client.stream("POST", "/v1/completions", json=ask(1000)) as reply:
            next(frames(reply))
            worker.send_signal(signal.SIGTERM)  # by itself this signal has no effect
            process.kill()
        gone, _ = psutil.wait_procs([worker], timeout=60)
        assert gone
    with serving(few_layers) as (_, client):
        cached, prompt = cached_of(client)
    assert cached >= prompt - 32, (cached, prompt)


@pytest.mark.long
def test_a_worker_that_hangs_does_not_outlive_its_server(few_layers: Path) -> None:
    """A worker that hangs ends after its server has ended.

    The worker is suspended, like one that waits forever, and resumes when it gets a signal.
    """
    with serving(few_layers) as (process, _):
        [worker] = [
            p
            for p in psutil.Process(process.pid).children()
            if "localllm.engine.worker.worker" in p.cmdline()
        ]
        worker.suspend()
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        gone, _ = psutil.wait_procs([worker], timeout=60)
        assert gone
