"""One MLX model on several machines: the same tokens, the complete contract, and one clear error if
a machine disappears.

The machines are emulated by processes that use MLX's ring on loopback. JACCL needs Thunderbolt 5,
so only its configuration is tested."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.drive import GREEDY
from localllm.engine.messages import Failure, Finish, Generation, Prefill, Request, Text
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import LocalLLMError, OtherMachineGoneError
from localllm_backends import conformance
from localllm_backends.contract import LoadSpec, OtherMachineError, Placement
from localllm_backends.mlx import backend_type as mlx
from models import tiny_mlx
from models.mlx_from_gguf import convert
from support.requests import events_of

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(mlx.available() is not None, reason=str(mlx.available())),
]

ROOT = Path(__file__).parent.parent
HERE = "127.0.0.1"
HALVED = {**tiny_mlx.LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama model whose heads can be divided between two machines."""
    return tiny_mlx.write(tmp_path_factory.mktemp("ring") / "halved", HALVED)


def spec(folder: Path, others: int, **more: Any) -> LoadSpec:
    return LoadSpec(
        str(folder),
        **{"n_ctx": 1024, "n_seq_max": 4, **more},
        placement=Placement(workers=(HERE,) * others),
    )


async def answer(
    host: Supervisor, id_: str, prompt: str, n_tokens: int = 16
) -> tuple[list[int], int]:
    """Return the tokens of a greedy answer and the number of its cached prompt tokens."""
    engine = await host.engine()
    found: list[int] = []
    cached = 0
    async for event in events_of(
        engine, Request(id_, prompt, Generation(GREEDY, n_tokens, ignore_eos=True))
    ):
        assert not isinstance(event, Failure), event
        if isinstance(event, Text):
            found += event.tokens
        if isinstance(event, Finish):
            cached = event.usage.cached_tokens
    return found, cached


def twenty(folder: Path, others: int) -> list[list[int]]:
    async def main() -> list[list[int]]:
        host = Supervisor(WorkerOptions(spec(folder, others), engine={"draft": "ngram"}))
        try:
            # Four at a time: batches form and end while other prompts are prefilled.
            answers = []
            for at in range(0, 20, 4):
                prompts = [f"The number {i} is special because" for i in range(at, at + 4)]
                answers += await asyncio.gather(*(answer(host, p, p) for p in prompts))
            return [tokens for tokens, _ in answers]
        finally:
            await host.close()

    return asyncio.run(main())


def test_twenty_prompts_get_the_same_answers_on_two_machines_as_on_one(folder: Path) -> None:
    assert twenty(folder, 1) == twenty(folder, 0)


@pytest.mark.long
def test_smollm2_gives_the_same_answers_on_three_machines_as_on_one(smollm2: Path) -> None:
    folder = convert(smollm2, ROOT.parent / ".cache" / "models" / "smollm2-135m-instruct-f32")
    assert twenty(folder, 2) == twenty(folder, 0)


CONFORMANCE = """
import json, sys
from localllm_backends import conformance
from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type

backend = backend_type.load(LoadSpec.from_json(json.loads(sys.argv[1])))
for check in conformance.CHECKS:
    try:
        conformance.Subject(backend).examine(check)
    except conformance.NotApplicable as e:
        print("left out:", check.__name__, e)
    else:
        print("holds:", check.__name__)
backend.check_integrity()
backend.close()
"""


@pytest.mark.parametrize("shape", ["plain", pytest.param("sliding", marks=pytest.mark.long)])
def test_the_contract_holds_for_a_shared_model(tmp_path: Path, shape: str) -> None:
    config = (
        HALVED
        if shape == "plain"
        else {
            **HALVED,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    )
    folder = tiny_mlx.write(tmp_path / shape, config)
    told = {
        "path": str(folder),
        "n_ctx": 512,
        "n_seq_max": 4,
        "n_batch": 32,
        "placement": {"workers": [HERE]},
    }
    ran = subprocess.run(
        [sys.executable, "-c", CONFORMANCE, json.dumps(told)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    # One check may not apply to this kind of memory.
    assert ran.stdout.count("holds:") >= len(conformance.CHECKS) - 1, ran.stdout


@pytest.mark.long
def test_a_shared_models_prefix_is_found_after_a_restart(folder: Path, tmp_path: Path) -> None:
    prompt = "the man in the hat and the man in the rain " * 12

    async def main() -> tuple[list[int], list[int], int]:
        options = WorkerOptions(
            spec(folder, 1), engine={"disk_dir": str(tmp_path), "disk_bytes": 10**9}
        )
        host = Supervisor(options)
        first, _ = await answer(host, "a", prompt)
        await host.close()
        second, cached = await answer(host, "b", prompt)
        await host.close()
        return first, second, cached

    first, second, cached = asyncio.run(main())
    assert second == first
    assert cached > 100


def followers() -> list[psutil.Process]:
    """Return the processes that act as the other machines."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie does not count
            if "localllm_backends.mlx.tensor_parallel" in process.cmdline():
                found.append(process)
    return found


@pytest.mark.parametrize("when", ["decode", pytest.param("prefill", marks=pytest.mark.long)])
def test_a_machine_that_disappears_causes_one_error_and_is_used_again(
    folder: Path, when: str
) -> None:
    async def lose() -> None:
        host = Supervisor(WorkerOptions(spec(folder, 1, n_ctx=4096)))
        try:
            engine = await host.engine()
            prompt = "some words of a long text " * (100 if when == "prefill" else 4)
            ends: list[Finish | Failure] = []
            async for event in events_of(
                engine, Request("a", prompt, Generation(GREEDY, 400, ignore_eos=True))
            ):
                if isinstance(event, Prefill if when == "prefill" else Text):
                    for process in followers():
                        process.kill()
                if isinstance(event, Finish | Failure):
                    ends.append(event)
            assert len(ends) == 1
            assert isinstance(ends[0], Failure)
            assert ends[0].code == "worker_died"
            assert HERE in ends[0].message
            until = time.monotonic() + 60
            while time.monotonic() < until:
                try:
                    assert len((await answer(host, "b", "The capital of France is", 8))[0]) == 8
                    return
                except LocalLLMError:
                    await asyncio.sleep(0)
            raise AssertionError("it does not come back")
        finally:
            await host.close()

    asyncio.run(lose())
    assert followers() == []


def test_killing_the_first_machine_ends_its_followers(folder: Path) -> None:
    async def main() -> None:
        host = Supervisor(WorkerOptions(spec(folder, 1)))
        engine = await host.engine()
        there = followers()
        assert len(there) == 1
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, there, 20)
        assert not any(p.is_running() for p in there)
        await host.close()

    asyncio.run(main())


def refused(named: Sequence[str], folder: Path) -> str:
    options = WorkerOptions(
        LoadSpec(str(folder), n_ctx=256, placement=Placement(workers=tuple(named)))
    )
    with pytest.raises(LocalLLMError) as refusal:
        asyncio.run(Supervisor(options).engine())
    assert "download" not in refusal.value.hint
    return str(refusal.value)


def test_heads_that_do_not_divide_among_machines_are_refused(tmp_path: Path) -> None:
    assert (
        "2 machines can't split this model evenly: its number of num_key_value_heads is 1"
        in refused([HERE], tiny_mlx.write_llama(tmp_path / "one"))
    )


def test_an_unreachable_machine_is_named_in_the_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses an ssh that exits like the real one for a host that does not answer."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    options = WorkerOptions(
        LoadSpec(str(folder), n_ctx=256, placement=Placement(workers=("anna@127.0.0.9",)))
    )
    with pytest.raises(
        OtherMachineGoneError,
        match=r"anna@127\.0\.0\.9 .*ssh could not reach "
        r"it",
    ) as refusal:
        asyncio.run(Supervisor(options).engine())
    assert "without a password" in refusal.value.hint


def test_ssh_starts_the_same_program_in_the_same_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an ssh that runs its command locally, a complete answer is generated."""
    ssh, log = tmp_path / "ssh", tmp_path / "log"
    ssh.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {shlex.quote(str(log))}\nfor last; do :; done\nexec '
        'sh -c "$last"\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    hosts = tmp_path / "hosts.json"
    hosts.write_text(
        json.dumps([{"ssh": "here", "ips": [HERE]}, {"ssh": "anna@studio", "ips": [HERE]}])
    )

    async def main() -> list[int]:
        host = Supervisor(
            WorkerOptions(
                LoadSpec(str(folder), n_ctx=256, placement=Placement(workers=(str(hosts),)))
            )
        )
        try:
            return (await answer(host, "a", "the man", 8))[0]
        finally:
            await host.close()

    assert len(asyncio.run(main())) == 8
    assert "-o BatchMode=yes" in log.read_text()
    assert "anna@studio -- " in log.read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "not a valid MLX hostfile"),
        ("[]", "at least two machines"),
        (
            '[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "-oProxyCommand=x", "ips": ["10.0.0.2"]}]',
            "not an SSH destination",
        ),
        (
            '[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["studio"]}]',
            "not a valid MLX hostfile",
        ),
        (
            '{"backend": "mpi", "hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": '
            '["10.0.0.2"]}]}',
            "mpi",
        ),
        (
            '{"backend": "jaccl", "hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", '
            '"ips": ["10.0.0.2"]}]}',
            "RDMA",
        ),
    ],
)
def test_an_invalid_hostfile_is_refused(tmp_path: Path, text: str, says: str) -> None:
    from localllm_backends.mlx.machines import ring_of

    (tmp_path / "hosts.json").write_text(text)
    with pytest.raises(OtherMachineError, match=says):
        ring_of([str(tmp_path / "hosts.json")])


def test_a_hostfile_of_thunderbolt_machines_is_what_jaccl_reads(tmp_path: Path) -> None:
    """The hostfile is as `mlx.distributed_config` writes it, and the variables are as
    mlx/_distributed_utils/launch.py passes them on."""
    from localllm_backends.mlx.machines import ring_of

    said = {
        "backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1"],
        "hosts": [
            {"ssh": "one", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]},
            {"ssh": "two", "ips": ["10.0.0.2"], "rdma": ["rdma_en2", None]},
        ],
    }  # fmt: skip
    (tmp_path / "hosts.json").write_text(json.dumps(said))
    ring = ring_of([str(tmp_path / "hosts.json")])
    assert [m.ssh for m in ring.machines] == ["", "two"]
    assert json.loads(ring.files([32323, 32324])["MLX_IBV_DEVICES"]) == [
        [None, "rdma_en2"],
        ["rdma_en2", None],
    ]
    assert ring.variables([32323, 32324]) == {
        "MLX_METAL_FAST_SYNCH": "1", "MLX_JACCL_COORDINATOR": "10.0.0.1:32323",
    }  # fmt: skip
