"""`localllm recommend` as a person and a script meet it: width, JSON, refusals, speed, what it remembers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from localllm.cli import measurements, recommend
from localllm.errors import ModelNotFoundError, UsageError

app = typer.Typer()
app.command()(recommend.recommend)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "M4 Max 128GB"],
        ["--device", "Jetson Orin Nano", "--for", "coding"],
        ["--device", "RTX 5090", "-m", "qwen3-32b"],
        ["--device", "DGX Spark", "--what-if", "RTX 5090"],
        ["--device", "RTX 4090", "--all"],
        ["--device", "M2 16GB", "--plot"],
        ["--device", "H100", "--for", "long"],
        ["--device", "M4 Max 128GB", "--explain"],
        ["--device", "M2 16GB", "-m", "qwen3-8b", "--explain"],
    ],
)
def test_everything_fits_80_columns(arguments: list[str]) -> None:
    for line in run(*arguments).splitlines():
        assert len(line) <= 80, line


def test_a_machine_one_does_not_have_is_not_told_what_to_run() -> None:
    assert "localllm pull" not in run("--device", "M4 Max 128GB")
    here = json.loads(run("--json"))["plans"][0]
    reference = f"{here['model']}:{here['variant']['quant']}"
    assert f"localllm chat -m {reference}" in run()


def test_one_models_table_on_a_mac_names_the_faster_engine_and_the_best_file() -> None:
    text = run("--device", "M2 16GB", "-m", "qwen3-8b")
    assert "the best of them here:" in text
    assert "of the bandwidth" in " ".join(text.split())
    body = json.loads(run("--device", "M2 16GB", "-m", "qwen3-8b", "--json"))
    assert sum(bool(p["reasons"]) for p in body["plans"]) == 1


def test_json_is_one_document_and_the_same_every_time() -> None:
    one, two = run("--device", "DGX Spark", "--json"), run("--device", "DGX Spark", "--json")
    assert one == two
    body = json.loads(one)
    assert body["schema"] == 1
    assert 1 <= len(body["plans"]) <= 8


def test_this_machine_gets_an_answer_without_a_network() -> None:
    body = json.loads(run("--json", "--offline"))
    assert body["device"]["simulated"] is False
    assert body["plans"]


def test_explain_shows_the_arithmetic_of_the_first_plan() -> None:
    text = run("--device", "RTX 4090", "--explain")
    for word in ("weights", "KV cache", "compute", "bound", "KV read", "first token", "rating"):
        assert word in text


def test_a_file_on_this_disk_can_be_asked_about(smollm2: Path) -> None:
    body = json.loads(run("-m", str(smollm2), "--json"))
    (plan,) = body["plans"]
    assert plan["memory"]["weights_bytes"] == 96_576_768
    assert plan["fits"] == "yes"


def test_pictures_are_written_where_asked(tmp_path: Path) -> None:
    for name, magic in (("roof.svg", b"<svg"), ("roof.png", b"\x89PNG")):
        run("--device", "M4 Max 128GB", "--plot", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-m", "qwen3-9b"], ModelNotFoundError),
        (["--for", "poetry"], UsageError),
        (["--device", "RTX 5090", "picture.svg"], UsageError),
    ],
)
def test_wrong_use_is_one_clear_error(arguments: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        run(*arguments)


def test_an_unknown_model_is_answered_with_near_names() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        run("-m", "qwen3-9b")
    assert "qwen3" in caught.value.hint


def test_what_was_measured_here_is_remembered_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.loads(run("-m", "qwen3-8b", "--json"))
    machine = before["device"]["name"]
    record = measurements.Record(
        machine, "smollm2-135m-instruct", "Q4_1", "llamacpp", 150.0, 64, n_ctx=4096, memory_bytes=10**9,
        predicted_memory_bytes=10**9,
    )  # fmt: skip
    measurements.keep(record)
    measurements.keep(record)
    assert measurements.load() == [record]
    after = json.loads(run("-m", "qwen3-8b", "--json"))
    assert after["plans"][0]["decode_tok_s"]["basis"] == "measured here: smollm2-135m-instruct"
    text = run("--check")
    assert "SmolLM2" in text
    assert "1.0 GB / 1.0 GB" in text


def test_check_says_so_when_nothing_was_measured() -> None:
    assert "nothing has been measured" in run("--check")


def test_a_damaged_file_of_measurements_is_no_measurement(tmp_path: Path) -> None:
    file = tmp_path / "measurements.json"
    for text in ("{", "[]", '{"runs": [1, {"machine": "x"}, {"machine": 1, "model": 2}]}'):
        file.write_text(text)
        assert measurements.load(file) == []


def test_loading_the_command_loads_no_heavy_library() -> None:
    code = (
        "import sys, localllm.cli.recommend, localllm.cli.measurements, localllm.cli.recommend_view;"
        "heavy = {'numpy', 'llama_cpp', 'fastapi', 'textual', 'httpx', 'huggingface_hub', 'mlx'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
