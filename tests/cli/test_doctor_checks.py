"""`doctor` runs what it reports: tokens on each backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.cli.doctor_checks import token_checks
from localllm.device.ggml import GgmlBuild
from localllm.library import starter


def test_doctor_computes_a_token_on_the_cpu() -> None:
    llamacpp, *mlx = token_checks(GgmlBuild(folder=""))
    assert (llamacpp.status, llamacpp.name) == ("ok", "llama.cpp token")
    assert "tok/s" in llamacpp.message
    assert all(check.status == "not checked" for check in mlx), (
        "no MLX model lies in a test's folders"
    )


def test_a_model_that_can_not_be_run_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(starter, "path", lambda: broken)
    check = token_checks(GgmlBuild(folder=""))[0]
    assert check.status == "error"
    assert check.fix
    assert "CPU reference failed" in check.message
    monkeypatch.setattr(starter, "path", lambda: None)
    assert token_checks(GgmlBuild(folder=""))[0].status == "not checked"
    assert not [c for c in token_checks(None) if c.name == "llama.cpp token"]
