"""`localllm bench --speculation`: what is measured is two ways of decoding the same kind of text,
and nothing recurs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from localllm.cli.bench import measure
from localllm.cli.bench import speculation as bench_speculation
from localllm.cli.commands import bench
from localllm.device.probes import matrix_rate
from localllm.engine.worker.client import WorkerOptions
from localllm.errors import UsageError
from localllm.load import measurements
from localllm.load.load_plan import load_plan_named
from localllm.settings import Settings
from localllm_backends.contract import LoadSpec

app = typer.Typer()
app.command()(bench.bench)


def test_no_prompt_recurs_so_nothing_is_drafted_from_an_earlier_answer() -> None:
    for workload in bench_speculation.WORKLOADS:
        assert len({bench_speculation.prompt(workload, seed) for seed in range(64)}) == 64


def test_the_edit_begins_with_its_one_change_made() -> None:
    text = bench_speculation.prompt("copy-edit", 3)
    before, _, after = text.partition("The same file")
    assert "maximum" not in before
    assert after.count("maximum") == 1


def test_figures_are_medians_their_ratio_and_the_accepted_share() -> None:
    runs = bench_speculation.Runs(
        {"off": [10.0, 50.0, 11.0], "auto": [22.0, 1.0, 30.0]}, accepted=30, rejected=10
    )
    figures = runs.to_json("prose")
    assert (figures["off_tok_s"], figures["auto_tok_s"], figures["gain"]) == (11.0, 22.0, 2.0)
    assert figures["acceptance"] == 0.75
    assert (
        bench_speculation.Runs({"off": [1.0], "auto": [1.0]}).to_json("prose")["acceptance"] is None
    )


def test_the_table_fits_80_columns_and_says_why_nothing_was_measured() -> None:
    runs = bench_speculation.Runs(
        {"off": [12345.6], "auto": [23456.7]}, accepted=99_999, rejected=9
    )
    figures = {
        "state": "on",
        "rounds": 1,
        "workloads": [runs.to_json("copy-edit"), runs.to_json("prose")],
    }
    lines = bench_speculation.table(figures)
    assert all(len(line) <= 80 for line in lines)
    assert "1.90×" in lines[1]
    off: dict[str, Any] = {
        "state": "this model's memory can't take tokens back",
        "rounds": 0,
        "workloads": [],
    }
    assert "can't take tokens back" in bench_speculation.table(off)[0]


def figures_of(path: Path, *, n_ctx: int, draft: str) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        engine = await WorkerOptions(
            LoadSpec(str(path), n_ctx=n_ctx), engine={"draft": draft}
        ).start()
        try:
            return await bench_speculation.measure(engine, 1)
        finally:
            await engine.close()

    return asyncio.run(go())


def test_an_engine_without_drafting_is_not_measured(tiny_model: Path) -> None:
    assert figures_of(tiny_model, n_ctx=1024, draft="off") == {
        "state": "switched off",
        "rounds": 0,
        "workloads": [],
    }


def test_too_short_a_context_is_said_before_anything_is_measured(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="too short"):
        figures_of(tiny_model, n_ctx=256, draft="auto")


@pytest.mark.long
def test_a_real_model_drafts_while_it_copies_and_the_command_reports_it(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROUNDS", 1), ("PROMPT_TOKENS", 64), ("DECODE_TOKENS", 16)):
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(bench_speculation, "TOKENS", {"prose": 32, "copy-edit": 96})
    monkeypatch.setattr(bench_speculation, "FUNCTIONS", 6)
    result = CliRunner().invoke(app, [str(smollm2), "--speculation", "--context", "1024", "--json"])
    assert result.exit_code == 0, result.output
    spoken = json.loads(result.stdout)["speculation"]
    prose, edit = spoken["workloads"]
    assert (spoken["state"], prose["workload"], edit["workload"]) == ("on", "prose", "copy-edit")
    assert edit["accepted_draft_tokens"] > 0
    for row in (prose, edit):
        assert row["gain"] == row["auto_tok_s"] / row["off_tok_s"] > 0


def test_the_prediction_knows_what_another_model_taught(
    few_layers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCALLLM_DATA_DIR", str(tmp_path))
    for name, value in (("ROUNDS", 1), ("PROMPT_TOKENS", 64), ("DECODE_TOKENS", 16)):
        monkeypatch.setattr(measure, name, value)

    # tests/device times the processor
    monkeypatch.setattr(matrix_rate, "measure", lambda types: None)
    result = CliRunner().invoke(app, [str(few_layers), "--context", "1024", "--json"])
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(result.stdout)
    assert "measured here" not in figures["basis"]
    (own,) = measurements.load()
    assert (own.depth, own.short_depth) == (64 + 8, 16 + 8)
    assert own.short_tok_s > 0
    load = load_plan_named(str(few_layers), Settings({"context": 1024}))
    # Its own earlier run is no prediction of the same.
    assert "measured here" not in measure.compare_and_keep(load, figures)["basis"]
    measurements.keep(replace(own, model="gemma-3-270m-it", quant="Q8_0", file_bytes=0))
    assert "measured here: gemma-3-270m-it" in measure.compare_and_keep(load, figures)["basis"]
    # On a disk that takes nothing the figures are told all the same.
    monkeypatch.setenv("LOCALLLM_DATA_DIR", str(few_layers / "within a file"))
    assert measure.compare_and_keep(load, figures)["predicted_memory_bytes"] > 0
    assert "can't be written" in capsys.readouterr().err
