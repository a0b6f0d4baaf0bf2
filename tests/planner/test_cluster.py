"""A model on several machines: the placement of its parts, the cost of the connection, and the
cases in which one machine is faster."""

from __future__ import annotations

import json
import statistics

import pytest
from typer.testing import CliRunner

from benchmarks.planner_fit.clusters import compared
from localllm.cli.all_commands import app
from localllm.cli.recommend.cluster import machines, usual_link
from localllm.device.name_lookup import resolve
from localllm.errors import UsageError
from localllm.library.catalog import load_catalog
from localllm.planner import cluster, speed
from localllm.planner.types import RunSettings

SETTINGS = RunSettings(n_ctx=32768)


def model(name: str):
    return next(m for m in load_catalog().models if m.id == name)


def variant(of, quant: str):
    return next(v for v in of.variants if v.format == "gguf" and v.quant == quant)


def test_two_equal_machines_share_evenly_and_each_byte_is_on_exactly_one() -> None:
    big = model("qwen3-235b-a22b-instruct-2507")
    q6 = variant(big, "Q6_K")
    spark = resolve("dgx spark")
    plan = cluster.plan(big, q6, SETTINGS, [spark, spark], cluster.LINKS["connectx7"])
    assert plan is not None
    assert [s.n_layers for s in plan.shares] == [47, 47]
    assert all(s.needs_bytes <= s.limit_bytes for s in plan.shares)
    assert sum(s.needs_bytes for s in plan.shares) >= sum(cluster.layers_bytes(big, q6, SETTINGS))
    assert plan.alone is None
    alone = speed.decode(spark, big, q6, SETTINGS).value
    assert 0.8 * alone < plan.decode_tok_s.value < alone
    assert plan.decode_tok_s.low < plan.decode_tok_s.value < plan.decode_tok_s.high
    assert plan.prefill_tok_s.high > 1.5 * plan.prefill_tok_s.value


def test_a_model_that_fits_on_one_machine_is_reported_as_faster_there() -> None:
    small = model("gpt-oss-120b")
    spark = resolve("dgx spark")
    plan = cluster.plan(
        small, variant(small, "MXFP4"), SETTINGS, [spark, spark], cluster.LINKS["10gbe"]
    )
    assert plan is not None
    assert plan.alone is spark
    assert "alone runs it at least as fast" in plan.advice


def test_the_faster_machine_is_filled_first() -> None:
    big = model("qwen3-235b-a22b-instruct-2507")
    plan = cluster.plan(
        big,
        variant(big, "Q4_K_M"),
        SETTINGS,
        machines("m3 ultra 512 + rtx 5090"),
        cluster.LINKS["10gbe"],
    )
    assert plan is not None
    assert "5090" in plan.shares[0].device.name
    assert plan.shares[0].n_layers < plan.shares[1].n_layers


def test_a_slower_link_costs_more_and_too_little_memory_is_no_plan() -> None:
    big = model("qwen3-235b-a22b-instruct-2507")
    boxes = machines("2x dgx spark")
    plans = [
        cluster.plan(big, variant(big, "Q6_K"), SETTINGS, boxes, link)
        for link in cluster.LINKS.values()
    ]
    assert all(p is not None for p in plans)
    waits = {p.link.name: p.transfer_s for p in plans if p is not None}
    assert waits["10 Gbit/s Ethernet"][1] > waits["ConnectX-7, 200 Gbit/s"][1]
    assert (
        cluster.plan(
            big, variant(big, "Q8_0"), SETTINGS, machines("2x rtx 5090"), cluster.LINKS["10gbe"]
        )
        is None
    )


def test_the_command_prints_the_division_and_refuses_incomplete_questions() -> None:
    runner = CliRunner()
    asked = ["recommend", "--device", "2x dgx spark", "-m", "gpt-oss-120b", "--link", "connectx7"]
    said = runner.invoke(app, asked)
    assert said.exit_code == 0, said.output
    assert "18 layers" in said.output
    assert "basis:" in said.output
    assert runner.invoke(app, asked[:-2]).output == said.output, "its own port is the usual link"
    found = json.loads(runner.invoke(app, [*asked, "--json"]).stdout)
    assert found[0]["shares"][0]["layers"] == 18
    for wrong in (
        ["--link", "string", *asked[1:5]],
        ["--link", "10gbe"],
        ["--link", "10gbe", "--device", "dgx spark", *asked[3:5]],
        [*asked[1:5], "--memory", "64"],
        [*asked[1:3], "--sees"],
    ):
        assert isinstance(runner.invoke(app, ["recommend", *wrong]).exception, UsageError)
    with pytest.raises(UsageError):
        machines("99x dgx spark")


def test_joined_machines_without_a_model_list_what_they_hold_only_together() -> None:
    runner = CliRunner()
    asked = ["recommend", "--device", "2x dgx spark"]
    found = json.loads(runner.invoke(app, [*asked, "--json"]).stdout)
    assert found["link"] == "ConnectX-7, 200 Gbit/s"
    rows = found["models"]
    assert len(rows) >= 5
    one = resolve("dgx spark")
    for row in rows:
        known = model(row["model"])
        best = variant(known, row["quant"])
        assert best.file_bytes < row["needs_bytes"] <= sum(found["usable_bytes"])
        assert row["gained_points"] >= 1
        alone = cluster.divide(known, best, RunSettings(n_ctx=row["n_ctx"]), [one])
        assert alone is None, f"{row['model']} needs both machines"
        if row["quant_alone"] is not None:
            held = variant(known, row["quant_alone"])
            assert held.file_bytes < best.file_bytes
    said = runner.invoke(app, asked, env={"COLUMNS": "120"})
    assert said.exit_code == 0, said.output
    for row in rows[:8]:
        assert model(row["model"]).name in said.output
    assert model(found["alone"]["model"]).name in said.output


def test_joining_machines_that_hold_every_model_alone_gains_none() -> None:
    said = CliRunner().invoke(
        app, ["recommend", "--device", "2x m3 ultra 512gb", "--for", "autocomplete"]
    )
    assert said.exit_code == 0, said.output
    assert "none of the catalog" in said.output
    assert "One of them alone runs" in said.output


def test_connected_machines_are_joined_by_their_fastest_port() -> None:
    assert usual_link("2x dgx spark") == "connectx7"
    assert usual_link("2x M4 Max 128GB") == "thunderbolt5"
    assert usual_link("2x strix halo 128GB") == "10gbe"
    for computer in ("dgx spark", "2x RTX 3090", "RTX 5090 + 64GB RAM", "2x a sundial"):
        assert usual_link(computer) is None


def test_predictions_for_two_machines_match_published_speeds() -> None:
    """Rows and sources are in benchmarks/data/clusters.csv. Predictions of prefill are less
    accurate than those of decoding, so the limit covers both."""
    rows = [r for r in compared() if r.n_machines == 2]
    writing = [r for r in rows if r.decoding and not r.shared]
    assert len(rows) >= 20
    assert statistics.median(abs(r.error) for r in rows) <= 0.2
    assert statistics.median(abs(r.error) for r in writing) <= 0.15
    assert statistics.median(abs(r.error) for r in writing if not r.seen) <= 0.15
    assert sum(r.predicted.low <= r.measured <= r.predicted.high for r in writing) >= 0.8 * len(
        writing
    )


def test_rpc_costs_each_token_time_on_the_fastest_link_too() -> None:
    big = model("qwen3-235b-a22b-instruct-2507")
    plan = cluster.plan(
        big, variant(big, "Q6_K"), SETTINGS, machines("2x dgx spark"), cluster.LINKS["connectx7"]
    )
    assert plan is not None
    assert plan.rpc_s == cluster.RPC_S[1]
    assert 1 / plan.decode_tok_s.value > plan.rpc_s + plan.transfer_s[0]
    assert "RPC's 5.5 ms" in plan.decode_tok_s.basis
    assert "--split 47,47" in plan.advice
