"""`localllm doctor MODEL` checks one model's file and the quality loss of its quant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from localllm.cli.commands.doctor import doctor
from localllm.errors import UsageError
from models.altered import write_altered, write_quant
from models.tiny_gguf import write_llama

app = typer.Typer()
app.command()(doctor)


@pytest.fixture
def exact(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "Tiny-F32.gguf")


def checks(model: Path, *, code: int) -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(app, [str(model), "--json"])
    assert result.exit_code == code, result.output
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def test_a_quant_is_compared_with_the_most_exact_file_of_its_model(exact: Path) -> None:
    quant = write_quant(exact, exact.with_name("Tiny-Q4_0.gguf"), "Q4_0")
    found = checks(quant, code=0)
    assert (found["file"]["status"], found["loss"]["status"]) == ("ok", "ok")
    assert "from Tiny-F32.gguf" in found["loss"]["message"]
    assert "times what Q4_0 loses elsewhere" in found["loss"]["message"]


def test_a_model_without_a_more_exact_file_has_only_a_perplexity(exact: Path) -> None:
    found = checks(exact, code=0)
    assert found["loss"]["status"] == "not checked"
    assert "its perplexity" in found["loss"]["message"]
    assert "--against" in found["loss"]["fix"]


def test_a_faulty_file_is_an_error_with_its_fix(exact: Path, tmp_path: Path) -> None:
    quant = write_quant(exact, tmp_path / "quant.gguf", "Q4_0")
    fields = {"tokenizer.ggml.add_bos_token": True}
    faulty = write_altered(quant, tmp_path / "Tiny-Q4_0.gguf", fields=fields)
    found = checks(faulty, code=4)
    assert found["bos"]["status"] == "error"
    assert "another BOS token" in found["bos"]["message"]
    assert found["bos"]["fix"]


def test_options_of_the_machine_are_refused_for_a_model(exact: Path) -> None:
    result = CliRunner().invoke(app, [str(exact), "--accelerator"])
    assert isinstance(result.exception, UsageError)
    assert "only that model" in result.exception.message
