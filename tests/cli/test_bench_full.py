"""`localllm bench --full` and `--compare`: everything is measured at a real engine, drawn, and held
beside an earlier run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from localllm.bench import plot
from localllm.cli import all_commands
from localllm.cli.bench import compare as bench_compare
from localllm.cli.bench import full as bench_full
from localllm.cli.bench import measure
from localllm.errors import UsageError


@pytest.mark.long
def test_all_of_it_is_measured_shown_and_compared(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROUNDS", 1), ("PROMPT_TOKENS", 64), ("DECODE_TOKENS", 16)):
        monkeypatch.setattr(measure, name, value)
    for name, value in (
        ("ROUNDS", 2),
        ("TOKENS", 8),
        ("PROMPT", 600),
        ("DEEP", 128),
        ("BATCHES", ()),
    ):
        monkeypatch.setattr(bench_full, name, value)
    monkeypatch.setattr(bench_full, "DEPTHS", (16, 128, 512))
    monkeypatch.setattr(bench_full, "STREAMS", (1, 2))
    monkeypatch.setattr(bench_full, "KV_TYPES", ("q8_0",))
    file = tmp_path / "run.json"
    file.write_text(
        '{"decode_tok_s": 1.0, "full": {"streams": [{"streams": 2, "together_tok_s": 2.0}]}}'
    )
    command = ["bench", str(tiny_model), "--full", "--context", "2048", "--compare", str(file)]
    done = CliRunner().invoke(all_commands.app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["full"]
    assert [row["depth"] for row in found["depths"]] == [16, 128, 512]
    assert all(row["decode_tok_s"] > 0 and row["prefill_tok_s"] > 0 for row in found["depths"])
    assert [row["streams"] for row in found["streams"]] == [1, 2]
    assert [row["kv_type"] for row in found["kv_types"]] == ["q8_0"], found["left_out"]
    assert all(
        row["decode_tok_s"] > 0 and row["memory_bytes"] > 0 for row in found["micro_batches"]
    )
    first = found["first_token"]
    assert first["prompt_tokens"] == 600
    assert first["warm_known_tokens"] >= 512, "what was just read is known"
    assert first["restart_known_tokens"] >= 512, "and after a restart it is read from disk"
    together = json.loads(done.stdout)["compared"]["full streams streams 2 together_tok_s"]
    assert together["ratio"] == together["now"] / 2.0
    assert all(
        len(line) <= 80 for line in bench_full.table(found) if not line.startswith("left out")
    )


def test_rows_are_compared_with_rows_of_the_same_name() -> None:
    then = {
        "decode_tok_s": 10.0,
        "full": {"depths": [{"depth": 16, "decode_tok_s": 5.0}, {"depth": 128, "decode_tok_s": 4}]},
    }
    now = {
        "decode_tok_s": 11.0,
        "full": {
            "depths": [{"depth": 128, "decode_tok_s": 8.0}, {"depth": 512, "decode_tok_s": 1}]
        },
    }
    found = bench_compare.compared(then, now)
    assert {name: row["ratio"] for name, row in found.items()} == {
        "decode_tok_s": 1.1,
        "full depths depth 128 decode_tok_s": 2.0,
    }
    assert all(len(line) <= 80 for line in bench_compare.table(found))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"decode_tok_s": "fast"}', "\x00"])
def test_what_is_no_run_is_refused_before_anything_is_measured(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    done = CliRunner().invoke(all_commands.app, ["bench", "no-such-model", "--compare", str(file)])
    assert isinstance(done.exception, UsageError)
    assert str(file) in str(done.exception)


_RATES = st.floats(0.01, 1e5)


@given(
    st.lists(
        st.builds(plot.PlotPoint, st.integers(0, 2**20), _RATES, st.none() | _RATES), max_size=9
    )
)
def test_the_picture_fits_and_shows_every_point(points: list[plot.PlotPoint]) -> None:
    said = plot.lines(points)
    assert bool(said) == bool(points)
    assert all(len(line) <= 80 for line in said)
    if points:
        assert any(mark in "".join(said[1:]) for mark in "●◉")
