"""Speeds that people pass on as a file: what is written, what is believed, and what they are used
for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from localllm.cli.commands import bench, recommend
from localllm.errors import UsageError
from localllm.load import measurements

app = typer.Typer()
app.command(name="bench")(bench.bench)
app.command(name="recommend")(recommend.recommend)

THEIRS = measurements.Record(
    "GeForce RTX 4090 24 GB",
    "qwen3-8b",
    "Q4_K_M",
    "llamacpp",
    60.0,
    544,
    n_ctx=4096,
    file="/home/them/qwen3.gguf",
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def written(tmp_path: Path, **changed: object) -> Path:
    """A file of speeds whose one run has `changed` keys."""
    measurements.keep(THEIRS)
    file = tmp_path / "speeds.json"
    run("bench", "--share", str(file))
    measurements.path().unlink()
    body = json.loads(file.read_text(encoding="utf-8"))
    body["runs"][0].update(changed)
    file.write_text(json.dumps(body), encoding="utf-8")
    return file


def test_a_shared_speed_predicts_such_a_machine_and_says_whose_it_is(tmp_path: Path) -> None:
    file = written(tmp_path)
    text = file.read_text(encoding="utf-8")
    assert "/home/them" not in text
    assert json.loads(text)["build"]["localllm"]
    run("bench", "--import", str(file))
    assert measurements.load() == []  # never among one's own
    body = json.loads(run("recommend", "--device", "RTX 4090", "-m", "qwen3-8b:Q4_K_M", "--json"))
    speed = body["plans"][0]["decode_tok_s"]
    assert speed["basis"] == "measured by others: this model"
    assert 55 < speed["value"] < 75
    other = json.loads(run("recommend", "--device", "RTX 4080", "-m", "qwen3-8b:Q4_K_M", "--json"))
    assert "measured" not in other["plans"][0]["decode_tok_s"]["basis"]


@pytest.mark.parametrize(
    "changed",
    [
        {"decode_tok_s": "fast"},
        {"decode_tok_s": 1e9},
        {"depth": -1},
        {"machine": "x\x1b[2J"},
        {"prompt_tokens": 1.5},
    ],
)
def test_what_could_be_no_speed_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="no speed that can be used"):
        measurements.take_in(written(tmp_path, **changed))
    assert not measurements.shared_path().exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"localllm_speeds": 2, "runs": []}', "[" * 50_000]
)
def test_another_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"other\.json"):
        measurements.take_in(file)


def test_nothing_measured_is_nothing_to_share(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing has been measured"):
        measurements.export(tmp_path / "speeds.json")
