"""Results of `bench`: two decode speeds, separated from other programs' noise.

Records of earlier versions still calibrate the planner.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from localllm import json_store
from localllm.cli.bench import compare, measure
from localllm.cli.bench.measure import second_fastest
from localllm.cli.commands import bench
from localllm.device.probes import matrix_rate
from localllm.errors import UsageError
from localllm.load import measurements
from localllm.load.load_plan import load_plan_named
from localllm.load.measured_by_others import SharedRow
from localllm.settings import Settings
from localllm_catalog import catalog

app = typer.Typer()
app.command()(bench.bench)

MODELS = {m.id: m for m in catalog.load().models}
OLD = {
    "machine": "two cores", "model": "smollm2-135m-instruct", "quant": "Q4_1",
    "backend": "llamacpp",
    "decode_tok_s": 97.9, "depth": 512, "kv_type": "f16", "prefill_tok_s": 295.9,
    "prompt_tokens": 512,
    "file_bytes": 98362432, "n_ctx": 8192,
}  # fmt: skip


def test_a_record_of_an_earlier_version_is_a_measurement_at_one_depth(tmp_path: Path) -> None:
    file = tmp_path / "measurements.json"
    file.write_text(json.dumps({"runs": [OLD]}))
    (run,) = measurements.for_planner(measurements.load(file), "two cores", MODELS)
    assert run.decoded == ((512, 97.9),)


def test_a_record_with_both_depths_is_kept_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "measurements.json"
    file.write_text(json.dumps({"runs": [OLD]}))
    record = replace(measurements.load(file)[0], short_tok_s=116.8, short_depth=48)
    measurements.keep(record, file)
    assert [asdict(r) for r in measurements.load(file)] == [asdict(record)]
    (run,) = measurements.for_planner([record], "two cores", MODELS)
    assert run.decoded == ((48, 116.8), (512, 97.9))


def test_each_figure_is_shown_with_the_length_of_its_context() -> None:
    """Each figure is shown with the length of its context.

    An earlier label, `empty` under `decode`, did not say what was empty and how full the other
    was.
    """
    figures = {
        "decode_tok_s": 97.9,
        "short_tok_s": 116.8,
        "prefill_tok_s": 295.9,
        "prompt_tokens": 512,
        "memory_bytes": 31e7,
    }
    shown = bench.lines({**figures, "predicted_decode_tok_s": 100.0})
    assert shown[0] == "decode        97.9 tok/s   predicted 100.0   after a prompt of 512 tokens"
    assert shown[1].endswith("after a prompt of 16 tokens")
    assert shown[2].endswith("of 512 tokens")


@given(st.lists(st.floats(20, 100), min_size=3, max_size=8))
def test_one_more_slow_round_does_not_change_the_result_and_one_fast_round_does_not_set_it(
    rates: list[float],
) -> None:
    found = second_fastest(rates)
    assert second_fastest([*rates, 1.0]) == found
    assert found <= second_fastest([*rates, 1000.0]) <= max(rates)
    assert second_fastest(rates[:3]) == sorted(rates[:3])[1]


def test_a_measurement_of_one_model_improves_the_prediction_for_another(
    few_layers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCALLLM_DATA_DIR", str(tmp_path))
    for name, value in (("ROUNDS", 1), ("PROMPT_TOKENS", 64), ("DECODE_TOKENS", 16)):
        monkeypatch.setattr(measure, name, value)

    # tests/device measures the processor
    monkeypatch.setattr(matrix_rate, "measure", lambda types: None)
    result = CliRunner().invoke(app, [str(few_layers), "--context", "1024", "--json"])
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(result.stdout)
    assert "measured here" not in figures["basis"]
    (own,) = measurements.load()
    assert (own.depth, own.short_depth) == (64 + 8, 16 + 8)
    assert own.short_tok_s > 0
    load = load_plan_named(str(few_layers), Settings({"context": 1024}))
    # An earlier run of the same model is not used as a prediction of it.
    assert "measured here" not in measure.compare_and_store(load, figures)["basis"]
    measurements.keep(replace(own, model="gemma-3-270m-it", quant="Q8_0", file_bytes=0))
    assert "measured here: gemma-3-270m-it" in measure.compare_and_store(load, figures)["basis"]
    # If the disk cannot be written, the figures are still returned.
    monkeypatch.setenv("LOCALLLM_DATA_DIR", str(few_layers / "within a file"))
    assert measure.compare_and_store(load, figures)["predicted_memory_bytes"] > 0
    assert "can't be written" in capsys.readouterr().err


def test_a_run_is_compared_with_an_earlier_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROUNDS", 1), ("_MAX_ROUNDS", 1), ("DECODE_TOKENS", 8)):
        monkeypatch.setattr(measure, name, value)
    file = tmp_path / "run.json"
    file.write_text('{"decode_tok_s": 2.0, "memory_bytes": 1000, "prefill_tok_s": null}')
    command = [str(tiny_model), "--context", "512", "--compare", str(file)]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    assert re.search(r"^  round 1: decode [0-9.]+ tok/s, prefill [0-9,]+ tok/s$", done.stderr, re.M)
    figures = json.loads(done.stdout)
    assert set(figures["compared"]) == {"decode_tok_s", "memory_bytes"}
    decode = figures["compared"]["decode_tok_s"]
    assert (decode["then"], decode["now"]) == (2.0, figures["decode_tok_s"])
    assert decode["ratio"] == figures["decode_tok_s"] / 2.0
    text = "\n".join(compare.lines(figures["compared"]))
    assert "now ÷ then" in text
    assert "decode, tok/s" in text


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"decode_tok_s": "fast"}'])
def test_a_file_without_figures_is_refused_before_the_model_is_measured(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "run.json"
    if content is not None:
        file.write_text(content)
    done = CliRunner().invoke(app, ["nosuch", "--compare", str(file)])
    assert isinstance(done.exception, UsageError)
    assert str(file) in done.exception.message


def test_a_run_is_shared_as_one_row_without_names_and_paths(
    few_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROUNDS", 1), ("_MAX_ROUNDS", 1), ("DECODE_TOKENS", 8)):
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(matrix_rate, "measure", lambda types: None)
    done = CliRunner().invoke(app, [str(few_layers), "--context", "512", "--share"])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert row["decode_tok_s"] > 0
    assert row["n_ctx"] == 512
    assert row["kv_type"] == "f16"
    assert row["file_bytes"] == few_layers.stat().st_size
    assert row["file_sha256"] is None
    assert "llama-cpp-python" in row["engine"]
    assert [key for key, value in row.items() if isinstance(value, str)] == [
        "device", "match", "accelerator", "model", "quant", "backend", "engine", "localllm",
        "kv_type", "how",
    ]  # fmt: skip
    assert json_store.record(SharedRow, {**row, "source": "issue 1"}) is not None
    assert str(few_layers.parent) not in done.stdout
    assert "not sent anywhere" in done.stderr


def test_share_is_refused_for_results_that_do_not_describe_the_machine(few_layers: Path) -> None:
    both = ["--share", "--against", "http://127.0.0.1:9"]
    assert "--share and --against can't be combined" in str(CliRunner().invoke(app, both).exception)
    earlier = ["--share", "--compare", "run.json"]
    refused = CliRunner().invoke(app, earlier).exception
    assert "--share and --compare can't be combined" in str(refused)
    slowed = CliRunner().invoke(app, [str(few_layers), "--share", "--power", "50"])
    assert "slowed down by --power" in str(slowed.exception)
    assert "measuring" not in slowed.output


@pytest.mark.parametrize("option", ["--rounds=2", "--scenarios=single", "--restart-cmd=true"])
def test_options_of_compared_servers_are_refused_without_servers(
    option: str, few_layers: Path
) -> None:
    refused = CliRunner().invoke(app, [str(few_layers), option])
    assert f"{option.partition('=')[0]} is for --against" in str(refused.exception)
