"""Imports of a command before it answers.

A list of models does not wait for modules of other commands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli.all_commands import app
from localllm.cli.main import run
from localllm.cli.root_command import command_line

# Each takes 5 to 60 ms of a start.
NOT_NEEDED = (
    "asyncio",
    "numpy",
    "textual",
    "starlette",
    "httpx",
    "llama_cpp",
    "concurrent.futures",
    "pydantic",
    "localllm.cli.commands.bench",
    "localllm_backends.values",
    "localllm.load.measurements",
    "localllm.device.ggml",
)
SCRIPT = """
import contextlib, gc, io, json, sys
from localllm.cli.main import run
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    run(["recommend", "--device", "RTX 4090", "--plain"])
print(json.dumps([sorted(sys.modules), len(said.getvalue()), gc.isenabled()]))
"""


def test_recommend_reads_only_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    modules, written, collects = json.loads(done.stdout)
    assert written > 500
    assert [name for name in NOT_NEEDED if name in modules] == []
    assert collects  # after `run`, its caller has the garbage collector again


def test_the_server_listens_before_it_imports_what_only_requests_need(tiny_model: Path) -> None:
    """The server listens before it imports modules that only requests need.

    Until then `serve` imports no client, no template engine, no numpy, no dialect and no
    pydantic. They are imported while the model loads. Planning does not need them either.
    """
    script = """
import sys
from localllm.load.load_plan import load_plan_named
from localllm.server import app
from localllm.server.http import run
from localllm.server.models.router import ModelRouter
from localllm.settings import Settings
app.create_app(ModelRouter([]))
load_plan_named(sys.argv[1], Settings({"context": 1024}))
print(*sys.modules)
"""
    modules = subprocess.run(
        [sys.executable, "-c", script, str(tiny_model)], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = (
        "localllm.server.dialects.openai.routes",
        "pydantic",
        "fastapi",
        "jinja2",
        "numpy",
        "llama_cpp",
        "httpx",
        "aiohttp",
        "huggingface_hub",
        "PIL",
    )
    assert [name for name in heavy if name in modules] == []


def imported_by(script: str, *arguments: str) -> list[str]:
    """Return the modules that this script has imported at its end."""
    command = [sys.executable, "-c", f"import sys\n{script}\nprint(*sys.modules)", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_the_worker_starts_before_the_catalog_is_imported() -> None:
    modules = imported_by("import localllm.cli.main, localllm.cli.serve.first_worker")
    later = ("typer", "localllm_catalog.types", "localllm.device.accelerators")
    assert [name for name in later if name in modules] == []


def test_a_router_is_created_without_modules_that_few_models_need(tiny_model: Path) -> None:
    """A router is created without modules that only some models need, because the worker waits for
    it.

    These are downloads, speeds of other machines, and stored tables.
    """
    script = """
from localllm.cli.serve.listening import server_settings
from localllm.cli.serve.model_router import router_of
from localllm.settings import Settings
settings = Settings({"context": 1024})
server_settings(settings)
router_of(sys.argv[1:], [], settings)
"""
    modules = imported_by(script, str(tiny_model))
    later = ("localllm.library.hub", "localllm.load.measured_by_others", "statistics", "csv")
    assert [name for name in later if name in modules] == []


def test_the_worker_has_the_processors_while_the_model_loads(tmp_path: Path) -> None:
    """While the model loads, the worker has the processors.

    Until the load ends, `serve` imports one dialect. A load imports no code of engine builds if
    there is no build.
    """
    script = """
import sys, threading
from localllm.cli.engine_builds import EngineFallback
from localllm.cli.serve.run import application
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ModelRouter
application(ModelRouter([]), ServerSettings())
for thread in threading.enumerate():
    if thread.name == "first uses":
        thread.join()
EngineFallback().loaded()
print(*sys.modules)
"""
    modules = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LOCALLLM_DATA_DIR": str(tmp_path)},
    ).stdout.split()
    assert "localllm.server.dialects.openai.routes" in modules
    later = [f"localllm.server.dialects.{name}.routes" for name in ("anthropic", "ollama")]
    assert [name for name in (*later, "localllm.setup.builds") if name in modules] == []


def test_the_first_screen_of_the_chat_imports_no_other_screen() -> None:
    script = "import sys, localllm_tui.app; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    later = [f"localllm_tui.screens.{name}" for name in ("picking", "dialogs", "picker", "models")]
    assert [name for name in ("pydantic", "typer", "numpy", *later) if name in modules] == []


def test_a_command_that_is_loaded_alone_is_the_same_as_in_the_complete_app(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        run(["models", "list", "--help"])
    assert left.value.code == 0
    assert "models list" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        run(["recommend", "--nonsense"])
    assert left.value.code == 2
    alone = command_line("recommend")
    assert (len(alone.registered_commands), len(alone.registered_groups)) == (1, 0)
    assert len(app.registered_commands) > 5  # the complete app is unchanged


def test_help_and_a_mistyped_command_know_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("recommend", "serve", "models", "worker"))
    with pytest.raises(SystemExit) as left:
        run(["recomend"])
    assert left.value.code == 2
    assert "recommend" in capsys.readouterr().err
