"""What a command reads before it answers: a list of models must not wait for what other commands
need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli.all_commands import app
from localllm.cli.main import run
from localllm.cli.root_command import command_line

# Each 5 to 60 ms of a start.
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
    assert collects  # whoever calls `run` gets the collector back


def test_the_server_is_up_before_what_only_requests_need(tiny_model: Path) -> None:
    """Until it listens `serve` imports no client, no template engine, no numbers' library, no
    dialect and no pydantic: that is done while the model loads. A plan needs none of it either."""
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


def test_the_chats_first_paint_waits_for_no_other_screen() -> None:
    script = "import sys, localllm_tui.app; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    later = [f"localllm_tui.screens.{name}" for name in ("picking", "dialogs", "picker", "models")]
    assert [name for name in ("pydantic", "typer", "numpy", *later) if name in modules] == []


def test_a_command_asked_for_alone_is_the_command_of_the_whole(
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
    assert len(app.registered_commands) > 5  # the whole is as it was


def test_help_and_a_mistyped_command_know_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("recommend", "serve", "models", "worker"))
    with pytest.raises(SystemExit) as left:
        run(["recomend"])
    assert left.value.code == 2
    assert "recommend" in capsys.readouterr().err
