"""`localllm serve` with several models: planned together, and loaded together or in turns.

The server listens on a port or a Unix socket.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from localllm.cli.serve.model_router import router_for
from localllm.engine.messages import Finish, Sampling
from localllm.errors import ModelFileError, ModelNotFoundError, UsageError
from localllm.load import fit_several_models
from localllm.load.fit_several_models import load_plans_together
from localllm.load.plan_inputs import PlanInputs
from localllm.planner.types import Plan
from localllm.server.models.router import ModelRouter
from localllm.server.models.worker import ModelAdmission
from localllm.settings import Settings
from support.requests import events_of, request_for


@pytest.fixture
def two(tiny_model: Path, tmp_path: Path) -> list[str | None]:
    """Two model files with different names."""
    for name in ("chatty", "filler"):
        shutil.copy(tiny_model, tmp_path / f"{name}.gguf")
    return [str(tmp_path / "chatty.gguf"), str(tmp_path / "filler.gguf")]


async def answer(models: ModelRouter, name: str) -> Finish:
    model = models.resolve(name)
    with model.lease():
        request = request_for(
            "r", "hello", max_tokens=3, sampling=Sampling(temperature=0), ignore_eos=True
        )
        events = [e async for e in events_of(await model.engine(), request)]
    assert isinstance(events[-1], Finish)
    return events[-1]


def test_two_models_stay_loaded_together_or_take_turns_if_they_do_not_fit(
    two: list[str | None],
) -> None:
    loads = load_plans_together(two, Settings())
    assert [load.name for load in loads] == ["chatty", "filler"]

    async def story() -> None:
        models = router_for(loads, ["fast=FILLER"])
        try:
            await models.preload()
            assert {m.name for m in models.list() if m.loaded} == {"chatty", "filler"}
            both = await asyncio.gather(answer(models, "chatty"), answer(models, "fast"))
            assert [f.usage.completion_tokens for f in both] == [3, 3]
        finally:
            await models.close()

    async def turns() -> None:
        models = ModelRouter(router_for(loads).named, ModelAdmission(loads[0].needs_bytes + 1))
        try:
            await models.preload()
            assert [m.name for m in models.list() if m.loaded] == ["chatty"]
            await answer(models, "filler")
            assert [m.name for m in models.list() if m.loaded] == ["filler"]
            await answer(models, "chatty")
            assert [m.name for m in models.list() if m.loaded] == ["chatty"]
        finally:
            await models.close()

    asyncio.run(story())
    asyncio.run(turns())


def test_automatic_contexts_shrink_until_both_fit_and_chosen_ones_do_not(
    two: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PlanInputs.plan

    def tight(self: PlanInputs, holds: Callable[[Plan], bool]) -> Plan:
        plan = real(self, holds)
        # A machine with three quarters of the memory that both models would need alone, all of it
        # for the context.
        kv = plan.settings.n_ctx * 1000
        need = plan.memory._replace(
            weights_bytes=0, kv_bytes=kv, compute_bytes=0, limit_bytes=150_000_000
        )
        return plan._replace(memory=need)

    monkeypatch.setattr(PlanInputs, "plan", tight)
    chosen = load_plans_together(two, Settings({"context": 131072}))
    assert [c.options.spec.n_ctx for c in chosen] == [131072, 131072]
    alone = load_plans_together(two[:1], Settings())[0].options.spec.n_ctx
    monkeypatch.setattr(fit_several_models, "MIN_SHARED_CONTEXT", 1)

    def tighter(self: PlanInputs, holds: Callable[[Plan], bool]) -> Plan:
        plan = tight(self, holds)
        return plan._replace(memory=plan.memory._replace(limit_bytes=int(1.5 * alone * 1000)))

    monkeypatch.setattr(PlanInputs, "plan", tighter)
    contexts = [p.options.spec.n_ctx for p in load_plans_together(two, Settings())]
    assert sum(contexts) <= 1.5 * alone
    assert max(contexts) == alone


@pytest.fixture
def mlx_folder(tmp_path: Path) -> Path:
    """Return a tiny MLX checkpoint, as mlx-lm saves it."""
    pytest.importorskip("mlx_lm")
    from models.tiny_mlx import write_llama

    folder = tmp_path / "tiny-mlx"
    folder.mkdir()
    return write_llama(folder)


def test_an_mlx_folder_is_planned_and_run_by_the_backend_that_accepts_it(
    mlx_folder: Path, two: list[str | None]
) -> None:
    loads = load_plans_together([str(mlx_folder), two[0]], Settings())
    assert [(load.local.format, load.plan and load.plan.backend) for load in loads] == [
        ("mlx", "mlx"), ("gguf", "llamacpp"),
    ]  # fmt: skip
    assert loads[0].plan is not None
    assert 0 < loads[0].options.spec.n_ctx <= loads[0].plan.model.native_context

    async def story() -> None:
        models = router_for(loads)
        try:
            finishes = [await answer(models, load.name) for load in loads]
            assert [f.usage.completion_tokens for f in finishes] == [3, 3]
        finally:
            await models.close()

    asyncio.run(story())


def test_a_backend_that_cannot_run_the_files_is_refused_before_anything_loads(
    mlx_folder: Path, two: list[str | None]
) -> None:
    for reference, backend in ((str(mlx_folder), "llamacpp"), (two[0], "mlx")):
        with pytest.raises(
            ModelFileError, match=f"not a model for the {backend} backend"
        ) as caught:
            load_plans_together([reference], Settings({"backend": backend}))
        assert "--backend" in caught.value.hint


def test_a_folder_that_is_no_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="is not a model"):
        load_plans_together([str(tmp_path)], Settings())


def test_duplicate_model_names_and_invalid_aliases_are_refused(two: list[str | None]) -> None:
    loads = load_plans_together([two[0], two[0]], Settings())
    with pytest.raises(UsageError, match="named twice"):
        router_for(loads)
    with pytest.raises(UsageError, match="must be NAME=MODEL"):
        router_for(loads[:1], ["fast=nothing"])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no AF_UNIX in Python")
def test_the_command_serves_a_unix_socket_until_it_is_stopped(two: list[str | None]) -> None:
    with tempfile.TemporaryDirectory(prefix="ll") as folder:
        path = Path(folder) / "s.sock"
        command = [
            sys.executable,
            "-m",
            "localllm",
            "serve",
            str(two[0]),
            "--also",
            str(two[1]),
            "--only",
        ]
        command += ["--unix", str(path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("serving on"):
                    break
            assert "the Unix socket" in said[-1], said
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localllm"
            ) as client:
                assert client.get("/health").status_code == 200
                served = client.get("/v1/models").json()["data"]
                assert [(m["id"], m["status"]["value"]) for m in served] == [
                    ("chatty", "loaded"), ("filler", "loaded"),
                ]  # fmt: skip
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
        assert process.returncode == 0
        assert not path.exists()


def test_the_engine_starts_before_the_web_server_is_imported() -> None:
    """The engine starts before the web server is imported.

    Until it has planned, `serve` imports no web framework, web server, template engine or
    formats of tool calls. They are imported while the model loads.
    """
    needed = (
        "cli.commands.serve, cli.serve.listening, cli.serve.model_router, cli.serve.run, "
        "load.load_plan, "
        "load.plan_inputs, server.models.unloading, server.models.router, "
        "server.http.sockets, server.http.settings, engine.worker.supervisor"
    )
    names = ", ".join(f"localllm.{n.strip()}" for n in needed.split(","))
    later = {
        "starlette", "uvicorn", "jinja2", "pydantic", "llama_cpp", "numpy",
        "localllm.conversation.tools", "localllm.device.health",
    }  # fmt: skip
    program = f"import sys, {names}; print(*({later} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def _served(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start `localllm serve` with these arguments, and return its first line of output."""
    command = [sys.executable, "-m", "localllm", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    return process, process.stderr.readline()


def test_the_server_listens_before_the_model_is_loaded(smollm2: Path) -> None:
    process, said = _served(str(smollm2))
    try:
        url = next(word for word in said.split() if word.startswith("http://")).removesuffix("/v1")
        with httpx.Client(base_url=url, timeout=60) as client:
            first = client.get("/health")
            assert first.json()["status"] in ("loading", "ok")
            states = {m["status"]["value"] for m in client.get("/v1/models").json()["data"]}
            assert states & {"loading", "loaded"}
            # The request waits for the model, without output of the server.
            body = {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
            assert (
                client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
            )
            assert client.get("/health").json() == {"status": "ok"}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_missing_model_ends_the_command_before_it_listens(tmp_path: Path) -> None:
    process, said = _served(str(tmp_path / "none.gguf"))
    process.communicate(timeout=30)
    assert "there is no file" in said
    assert process.returncode == ModelNotFoundError.exit_code


def test_the_command_ends_if_its_only_model_cannot_be_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:-3000])
    process, said = _served(str(broken), "--only")
    _, rest = process.communicate(timeout=30)
    assert "error: " in said + rest
    assert process.returncode == ModelFileError.exit_code
