"""What `bench` keeps: two decode figures, told from a neighbour's noise; records of before still
teach the planner."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from localllm.cli.bench.timing import second_fastest
from localllm.cli.commands import bench
from localllm.load import measurements
from localllm_catalog import catalog

MODELS = {m.id: m for m in catalog.load().models}
OLD = {
    "machine": "two cores", "model": "smollm2-135m-instruct", "quant": "Q4_1",
    "backend": "llamacpp",
    "decode_tok_s": 97.9, "depth": 512, "kv_type": "f16", "prefill_tok_s": 295.9,
    "prompt_tokens": 512,
    "file_bytes": 98362432, "n_ctx": 8192,
}  # fmt: skip


def test_a_record_of_before_is_a_measurement_at_one_depth(tmp_path: Path) -> None:
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


def test_each_figure_says_of_how_long_a_context_it_is() -> None:
    """`empty` under `decode` left it to the reader's guess what was empty, and how full the other
    was."""
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
def test_a_slow_round_more_changes_nothing_and_a_lucky_one_does_not_decide(
    rates: list[float],
) -> None:
    found = second_fastest(rates)
    assert second_fastest([*rates, 1.0]) == found
    assert found <= second_fastest([*rates, 1000.0]) <= max(rates)
    assert second_fastest(rates[:3]) == sorted(rates[:3])[1]
