"""The command `setup`: errors state the way out, and a machine without a GPU stays unchanged."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from localllm.cli.all_commands import app
from localllm.errors import LocalLLMError
from localllm.setup import builds

RUNNER = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["--use", "nowhere"], 3),
        (["--use", "../../etc"], 2),
        (["--remove", "nowhere"], 3),
        (["--remove", "own"], 2),
        (["--backend", "abacus"], 2),
        (["--device", "rtx 5090"], 2),
        (["--list", "--dry-run"], 2),
        (["--dry-run", "--device", "no such machine"], 3),
        (["--dry-run", "--device", "M4 Max 128GB", "--backend", "cuda"], 6),
        (["--engine", "newest"], 2),
        (["--engine", "0.3.36; rm"], 2),
        (["--engine", "0.33.0", "--backend", "mlx"], 2),
    ],
)
def test_a_failed_setup_gives_a_hint_and_makes_no_build(
    arguments: list[str], exit_code: int
) -> None:
    result = RUNNER.invoke(app, ["setup", *arguments])
    assert isinstance(result.exception, LocalLLMError)
    assert result.exception.exit_code == exit_code
    assert result.exception.hint
    assert builds.listed() == []


def test_for_a_named_machine_setup_lists_the_steps_without_running_them() -> None:
    result = RUNNER.invoke(app, ["setup", "--dry-run", "--device", "rtx 5090"])
    assert result.exit_code == 0
    assert "native code of sm_120" in result.output
    assert builds.listed() == []


def test_an_archive_is_preferred_to_a_compilation_if_one_fits() -> None:
    """No ready wheel has code for this machine's card, so the archive comes before the
    compilation."""
    shown = RUNNER.invoke(app, ["setup", "--dry-run", "--device", "rtx 5090"]).output
    archive = shown.index("llama.cpp latest for CUDA, its makers' own archive")
    assert archive < shown.index("native code of sm_120")
    jetson = RUNNER.invoke(app, ["setup", "--dry-run", "--device", "jetson orin nano"]).output
    assert "llama.cpp's archives for CUDA have no code for this Jetson" in jetson
    wheel = RUNNER.invoke(app, ["setup", "--dry-run", "--device", "rtx 3060"]).output
    assert wheel.index("llama-cpp-python's own wheel") < wheel.index("its makers' own archive")


@pytest.mark.parametrize(
    "machine", ["rtx 5090", "rtx 3060", "M4 Max 128GB", "Strix Halo 128GB", "8GB laptop"]
)
def test_another_release_is_built_without_replacing_existing_builds(machine: str) -> None:
    """This also applies if the installed release needs no build. The build's name and every step
    contain the requested release."""
    result = RUNNER.invoke(app, ["setup", "--dry-run", "--engine", "0.3.99", "--device", machine])
    assert result.exit_code == 0
    assert "llama-cpp-python 0.3.99 was requested" in result.output
    steps = [line for line in result.output.splitlines() if "$ " in line]
    assert any("llama-cpp-python==0.3.99" in line for line in steps)
    assert not any("llama-cpp-python==0.3.3" in line for line in steps)


def test_on_this_machine_no_build_is_needed_and_the_list_shows_the_used_engine() -> None:
    """This machine's own llama.cpp supports its hardware, so no build is needed."""
    assert RUNNER.invoke(app, ["setup", "--use", "own"]).exit_code == 0
    listed = RUNNER.invoke(app, ["setup", "--list"]).output
    assert listed.startswith("* own")
