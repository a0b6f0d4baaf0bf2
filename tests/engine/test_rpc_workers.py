"""Layers on other machines with llama.cpp's RPC: the same tokens, and one clear error if a machine
disappears.

Most tests need a build of llama.cpp with RPC (`localllm setup --rpc`). The tests that don't come
first."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.drive import GREEDY
from localllm.cli.all_commands import app
from localllm.cli.commands.worker import networks
from localllm.engine.messages import Failure, Finish, Generation, Prefill, Request, Text
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import LocalLLMError, OtherMachineGoneError, UsageError
from localllm_backends.contract import LoadSpec, OtherMachineError, Placement
from localllm_backends.llamacpp.binding.engine_files import library_path
from localllm_backends.llamacpp.rpc import connect
from support.requests import events_of

needs_rpc = pytest.mark.skipif(
    library_path("ggml-rpc") is None, reason="this build of llama.cpp has no RPC"
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_a_worker_on_a_public_address_requires_a_list_of_allowed_hosts() -> None:
    result = CliRunner().invoke(app, ["worker", "--host", "0.0.0.0"])
    assert isinstance(result.exception, UsageError)
    assert "without --allow" in str(result.exception)
    assert "ssh -N -L" in result.exception.hint
    assert "WireGuard" in result.exception.hint
    for everybody in ("0.0.0.0/0", "::/0", "nonsense"):
        with pytest.raises(UsageError):
            networks([everybody])
    assert str(networks(["10.0.0.7/29"])[0]) == "10.0.0.0/29"


@pytest.mark.parametrize("named", ["hosts.json", "anna@studio.local", "10.0.0.8:", ":50052"])
def test_a_worker_without_a_port_is_refused_with_the_form_of_its_address(named: str) -> None:
    with pytest.raises(OtherMachineError, match=f"{named} is no HOST:PORT"):
        connect([named])


def test_without_rpc_support_the_error_names_the_way_to_get_it(tiny_model: Path) -> None:
    if library_path("ggml-rpc") is not None:
        pytest.skip("this build has RPC")
    spec = LoadSpec(str(tiny_model), n_ctx=256, placement=Placement(workers=("127.0.0.1:9",)))
    with pytest.raises(OtherMachineGoneError, match="setup --rpc"):
        asyncio.run(Supervisor(WorkerOptions(spec)).engine())


@contextmanager
def workers(
    n: int, ports: list[int] | None = None
) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Run `n` processes of `localllm worker`, each with one thread."""
    ports = ports or [free_port() for _ in range(n)]
    with ExitStack() as stack:
        processes = []
        for port in ports:
            command = [
                sys.executable,
                "-m",
                "localllm",
                "worker",
                "--port",
                str(port),
                "--threads",
                "1",
            ]
            process = stack.enter_context(
                subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
            )
            stack.callback(gone, process)
            processes.append(process)
        for port in ports:
            wait_for(port)
        yield [f"127.0.0.1:{port}" for port in ports], processes


def gone(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker and its RPC server at once."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as s:
            s.settimeout(1)
            # The worker's port opens before the RPC server is ready, but it answers only after
            # that.
            if s.connect_ex(("127.0.0.1", port)) == 0:
                try:
                    if s.recv(1) != b"":
                        return
                except TimeoutError:
                    return
    raise AssertionError("the worker does not listen")


def options(path: Path, at: list[str], split: tuple[float, ...] = ()) -> WorkerOptions:
    placement = Placement(gpu_layers=-1 if at else 0, workers=tuple(at), tensor_split=split)
    spec = LoadSpec(str(path), n_ctx=4096, n_seq_max=2, placement=placement)
    return WorkerOptions(spec, "llamacpp", {"draft": "off"})


def greedy(id_: str, prompt: str, n_tokens: int) -> Request:
    return Request(id_, prompt, Generation(GREEDY, n_tokens, ignore_eos=True))


async def tokens(host: Supervisor, request: Request) -> list[int]:
    engine = await host.engine()
    found: list[int] = []
    async for event in events_of(engine, request):
        if isinstance(event, Text):
            found += event.tokens
    return found


@needs_rpc
@pytest.mark.long
@pytest.mark.parametrize("split", [(3.0, 1.0), (5.0, 2.0, 1.0)])
def test_twenty_prompts_get_the_same_answers_with_rpc_workers(
    smollm2: Path, split: tuple[float, ...]
) -> None:
    async def all_of(at: list[str], shares: tuple[float, ...]) -> list[list[int]]:
        host = Supervisor(options(smollm2, at, shares))
        try:
            return [
                await tokens(host, greedy(str(i), f"The number {i} is special because", 16))
                for i in range(20)
            ]
        finally:
            await host.close()

    alone = asyncio.run(all_of([], ()))
    with workers(len(split)) as (at, _):
        assert asyncio.run(all_of(at, split)) == alone


@needs_rpc
@pytest.mark.long
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_an_rpc_worker_that_disappears_causes_one_error_and_is_used_again(
    smollm2: Path, when: str
) -> None:
    ports = [free_port(), free_port()]

    async def lose() -> None:
        with ExitStack() as stack:
            at, processes = stack.enter_context(workers(2, ports))
            host = Supervisor(options(smollm2, at, (1.0, 1.0)))
            try:
                engine = await host.engine()
                prompt = "some words of a long text " * (500 if when == "prefill" else 4)
                ends: list[Finish | Failure] = []
                async for event in events_of(engine, greedy("a", prompt, 400)):
                    at_prefill = isinstance(event, Prefill) and when == "prefill"
                    if at_prefill or (isinstance(event, Text) and when == "decode"):
                        gone(processes[1])
                    if isinstance(event, Finish | Failure):
                        ends.append(event)
                assert len(ends) == 1
                assert isinstance(ends[0], Failure)
                assert ends[0].code == "worker_died"
                assert at[1] in ends[0].message
                print(json.dumps({when: ends[0].message}))
                with pytest.raises(OtherMachineGoneError, match="does not answer") as gone_:
                    await host.engine()
                assert "download" not in gone_.value.hint
                stack.enter_context(workers(1, [ports[1]]))
                assert len(await again(host)) == 8
            finally:
                await host.close()

    asyncio.run(lose())


async def again(host: Supervisor) -> list[int]:
    """Send the next request until it is served. A supervisor may pause after several failures in a
    row."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            return await tokens(host, greedy("b", "The capital of France is", 8))
        except LocalLLMError:
            await asyncio.sleep(0)
    raise AssertionError("it does not come back")
