"""A share of every layer on each machine: the bytes on each, the speed, and the possible
combinations of models and machines."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.planner_fit.clusters import compared
from localllm.cli.all_commands import app
from localllm.cli.recommend.cluster import machines
from localllm.library.catalog import load_catalog
from localllm.planner import cluster
from localllm.planner.types import RunSettings
from localllm_catalog.types import Model, Variant

SETTINGS = RunSettings(n_ctx=32768)
LINK = cluster.LINKS["thunderbolt5"]


def found(name: str, quant: str = "4bit") -> tuple[Model, Variant]:
    model = next(m for m in load_catalog().models if m.id == name)
    return model, next(v for v in model.variants if v.format == "mlx" and v.quant == quant)


@pytest.mark.parametrize("name", ["qwen3-235b-a22b-instruct-2507", "llama-3.3-70b-instruct"])
def test_more_machines_hold_less_each_and_speed_up_less_than_their_number(
    name: str,
) -> None:
    model, variant = found(name)
    needs, speeds = [], []
    for n in (1, 2, 4):
        plan = cluster.tensor_parallel_plan(
            model, variant, SETTINGS, machines(f"{n}x m3 ultra 512gb"), LINK
        )
        assert plan is not None
        needs.append(plan.needs_bytes)
        speeds.append(plan.decode_tok_s.value)
        assert plan.decode_tok_s.low <= plan.decode_tok_s.value <= plan.decode_tok_s.high
        assert plan.decode_tok_s.value <= n * plan.alone_tok_s
    # The parts that every machine stores in full are small for these models.
    assert needs[0] / 2 < needs[1] < 0.6 * needs[0]
    assert needs[1] / 2 < needs[2] < 0.65 * needs[1]
    assert speeds[0] < speeds[1] < 2 * speeds[0]
    assert speeds[1] < speeds[2] < 2 * speeds[1]


def test_over_ethernet_tensor_parallelism_is_slower_than_one_machine() -> None:
    model, variant = found("qwen3-235b-a22b-instruct-2507")
    boxes = machines("2x m3 ultra 512gb")
    plan = cluster.tensor_parallel_plan(model, variant, SETTINGS, boxes, cluster.LINKS["10gbe"])
    assert plan is not None
    assert plan.decode_tok_s.value < plan.alone_tok_s
    assert (
        plan.decode_tok_s.value
        < cluster.tensor_parallel_decode(model, variant, SETTINGS, boxes, LINK).value
    )


def test_a_share_that_does_not_fit_on_a_machine_gives_no_plan() -> None:
    model, variant = found("qwen3-235b-a22b-instruct-2507")
    assert (
        cluster.tensor_parallel_plan(model, variant, SETTINGS, machines("2x m4 max 64gb"), LINK)
        is None
    )


@pytest.mark.parametrize(
    ("name", "quant", "boxes", "says"),
    [
        (
            "qwen3-235b-a22b-instruct-2507",
            "4bit",
            "3x m3 ultra 512gb",
            "3 machines can't divide 4 heads evenly",
        ),
        ("gemma-3-27b-it", "4bit", "2x m3 ultra 512gb", "no tensor-parallel version of gemma-3"),
        ("llama-3.3-70b-instruct", "4bit", "2x dgx spark", "only Macs can share"),
        ("llama-3.3-70b-instruct", "4bit", "2x m3 ultra 512gb", ""),
    ],
)
def test_the_reason_against_tensor_parallelism_is_reported(
    name: str, quant: str, boxes: str, says: str
) -> None:
    model, variant = found(name, quant)
    assert says in cluster.why_not(model, variant, machines(boxes))
    assert bool(says) == bool(cluster.why_not(model, variant, machines(boxes)))


def test_the_command_shows_both_ways_to_use_two_macs() -> None:
    asked = [
        "recommend",
        "--device",
        "2x m3 ultra 512gb",
        "-m",
        "llama-3.3-70b-instruct",
        "--link",
        "thunderbolt5",
    ]
    said = CliRunner().invoke(app, asked)
    assert said.exit_code == 0, said.output
    assert "a half of every layer on each" in said.output
    assert "one alone" in said.output
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert {plan["split"] for plan in told} == {"layers", "shared"}


def test_predictions_for_tensor_parallel_rows_are_less_than_half_too_fast() -> None:
    """Two rows are too few for a formula: docs/many-machines.md lists both, with their errors."""
    shared = [r for r in compared() if r.shared]
    assert len(shared) >= 2
    assert all(0 < r.error < 0.5 for r in shared)
