"""A machine whose GPU the installed build cannot use.

Plans are for its processor, and every list names the unused GPU.
"""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from device import recordings
from localllm.cli.all_commands import app
from localllm.device import detect as detection

RUNNER = CliRunner()


@pytest.fixture
def a_4090_under_a_build_for_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the readings of another machine; the installed engine drives no GPU."""
    monkeypatch.setattr(detection, "read", lambda **_: recordings.load("rtx_4090_two"))


@pytest.mark.usefixtures("a_4090_under_a_build_for_the_processor")
def test_plans_are_for_the_cpu_and_give_the_speed_of_a_cuda_build() -> None:
    device = detection.detect()
    assert device.accelerator == "cpu"
    assert detection.hardware().accelerator == "cuda"
    result = RUNNER.invoke(app, ["recommend"])
    assert result.exit_code == 0, result.output
    assert re.search(
        r"with a CUDA build of llama.cpp .* \d+-\d+ tok/s: `localllm "
        r"setup`",
        result.output,
    )


@pytest.mark.usefixtures("a_4090_under_a_build_for_the_processor")
def test_device_shows_that_the_gpu_is_unused_and_the_speed_of_a_cuda_build() -> None:
    result = RUNNER.invoke(app, ["device"])
    assert "RTX 4090" in result.output
    assert "is not used" in result.output
    assert "localllm setup" in result.output
    assert re.search(r"with a CUDA build .* tok/s", result.output)


def test_a_named_machine_is_not_compared_with_the_build_installed_here() -> None:
    result = RUNNER.invoke(app, ["recommend", "--device", "rtx 4090"])
    assert "localllm setup" not in result.output
    assert "llama.cpp" not in RUNNER.invoke(app, ["device", "--device", "rtx 4090"]).output
