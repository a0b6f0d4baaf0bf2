"""`recommend --budget USD`: machines up to a price, ranked by what they run."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from localllm.cli.all_commands import app
from localllm.device import parts_table
from localllm.device.prices import machines_up_to, prices
from localllm.errors import UsageError
from localllm.planner.budget import ranked
from localllm.planner.types import Workload
from localllm_catalog import catalog

MODELS = [catalog.load().by_id[name] for name in ("qwen3-8b", "qwen3-32b", "llama-3.2-1b-instruct")]
QUESTION = ["recommend", "-m", "qwen3-8b", "--budget"]


def test_each_price_is_of_a_listed_machine_and_size_and_has_a_source_and_a_date() -> None:
    sizes = {row.name: row.memory_gb for row in parts_table.rows()}
    cards = {row.name for row in parts_table.rows() if row.kind == "discrete"}
    for price in prices():
        assert price.memory_gb in sizes[price.machine], price
        assert price.usd > 0
        assert price.source.startswith("https://"), price
        assert re.fullmatch(r"20\d\d(-(0[1-9]|1[0-2]))?", price.date), price
        assert price.is_of_card == (price.machine in cards), price
    named = [(price.machine, price.memory_gb) for price in prices()]
    assert len(named) == len(set(named))


def test_machines_above_the_budget_or_without_a_price_are_not_listed() -> None:
    found = machines_up_to(1699)
    assert {price.usd <= 1699 for price, _ in found} == {True}
    assert "M5 Pro (up to 20-core GPU)" in {price.machine for price, _ in found}
    assert all(
        device.memory.total_bytes >= 0.9 * price.memory_gb * 2**30 for price, device in found
    )
    assert len(machines_up_to(1e6)) == len(prices())


def test_the_machine_with_the_better_model_is_first_and_one_without_a_model_last() -> None:
    offers = ranked(machines_up_to(2000), MODELS, Workload("coding"))
    points = [offer.plan.score for offer in offers if offer.plan is not None]
    assert points == sorted(points, reverse=True)
    assert [offer.plan is None for offer in offers] == sorted(
        offer.plan is None for offer in offers
    )
    first = offers[0]
    assert first.plan is not None
    assert first.plan.model.id == "qwen3-32b"


def test_of_machines_with_equal_points_the_cheaper_is_first() -> None:
    (price, device), *_ = machines_up_to(1e6)
    dearer = price._replace(usd=9999)
    offers = ranked([(dearer, device), (price, device)], MODELS, Workload())
    assert [offer.price.usd for offer in offers] == [price.usd, 9999]


@pytest.mark.parametrize("columns", [60, 80, 130])
def test_the_answer_names_price_date_and_source_of_each_row(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, [*QUESTION, "1699"])
    assert result.exit_code == 0, result.output
    table, _, sources = result.stdout.partition("\n\n")
    rows = [line for line in table.splitlines() if re.match(r" *\d+ ", line)]
    numbers = [line.split()[0] for line in rows]
    named = re.findall(r"^  ([\d, ]+): (20[\d-]+), https://\S+$", sources, re.MULTILINE)
    assert sorted(numbers) == sorted(n for group, _ in named for n in group.split(", "))
    assert all("$" in line and len(line) <= columns for line in rows)
    assert "the card alone" in sources


def test_json_has_every_machine() -> None:
    answer = json.loads(CliRunner().invoke(app, [*QUESTION, "1699", "--json"]).stdout)
    assert len(answer["machines"]) == len(machines_up_to(1699))
    for machine in answer["machines"]:
        assert {"price_usd", "price_date", "price_source", "price_of"} <= machine.keys()
        assert machine["model"] == "qwen3-8b"


@pytest.mark.parametrize("more", [["5"], ["2000", "--device", "RTX 5090"], ["2000", "--at", "30"]])
def test_a_budget_below_all_prices_or_with_a_device_or_a_speed_is_refused(more: list[str]) -> None:
    result = CliRunner().invoke(app, [*QUESTION, *more])
    assert isinstance(result.exception, UsageError)
    assert result.exception.hint
