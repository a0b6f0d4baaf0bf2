"""The answer to `recommend --budget USD`: the machines up to that price, best first."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from localllm.cli.recommend.page import clip, paragraph, speed, width
from localllm.cli.recommend.view import NONE_INSTALLED, marked
from localllm.device.prices import machines_up_to, prices
from localllm.device.types import Device
from localllm.errors import UsageError
from localllm.formatting import span
from localllm.plain_output import TerminalLine, ascii_json
from localllm.planner import scoring
from localllm.planner.budget import PricedMachine, ranked
from localllm.planner.starting_settings import Overrides
from localllm.planner.types import Plan, Workload
from localllm_catalog.types import Model

_MAX_SHOWN = 12
# Columns of a row without the names of machine and model and without the quant.
_FIGURE_COLUMNS = 30
_QUANT_COLUMNS = 12
_MIN_QUANT_WIDTH = 100


def answer(
    budget_usd: float,
    models: Sequence[Model],
    workload: Workload,
    overrides: Overrides,
    *,
    as_json: bool,
) -> list[str]:
    """Return the lines of the answer, or one JSON text. Raises UsageError if no machine costs that
    little."""
    machines = machines_up_to(budget_usd)
    if not machines:
        cheapest = min(prices(), key=lambda price: price.usd)
        raise UsageError(
            f"--budget {budget_usd:g}: no machine with a known price costs that little",
            hint=f"the cheapest is {cheapest.machine}, {_dollars(cheapest.usd)}",
            param="--budget",
        )
    line = TerminalLine(sys.stderr)
    numbers = itertools.count(1)

    def show(device: Device) -> None:
        line.show(f"planning {next(numbers)} of {len(machines)}: {device.name}")

    offers = ranked(machines, models, workload, overrides, show)
    line.show("")
    if as_json:
        rows = [_as_json(offer) for offer in offers]
        return [ascii_json({"budget_usd": budget_usd, "machines": rows})]
    return _lines(budget_usd, offers, workload)


def _as_json(offer: PricedMachine) -> dict[str, Any]:
    price = offer.price
    fields: dict[str, Any] = {
        "device": offer.device.name,
        "price_usd": price.usd,
        "price_of": price.of,
        "price_date": price.date,
        "price_source": price.source,
        "model": None,
    }
    plan = offer.plan
    if plan is not None:
        fields |= {
            "model": plan.model.id,
            "quant": plan.variant.quant,
            "backend": plan.backend,
            "points": round(plan.score, 1),
            "tok_s": [round(plan.stream_range.low, 1), round(plan.stream_range.high, 1)],
            "ttft_s": round(plan.ttft_s.value, 2),
        }
    return fields


def _lines(budget_usd: float, offers: Sequence[PricedMachine], workload: Workload) -> list[str]:
    purpose = scoring.need_of(workload).purpose_text
    budget = _dollars(budget_usd)
    lines = paragraph(
        f"Machines up to {budget} for {purpose}, best first, each with its first model"
    )
    shown = offers[:_MAX_SHOWN]
    table = _MachineTable(shown)
    lines.append(table.head())
    lines += [table.row(number, offer) for number, offer in enumerate(shown, 1)]
    n_more = len(offers) - len(shown)
    if n_more > 0:
        lines.append(f"  … and {n_more} more (--json lists all)")
    lines.append("")
    if any(offer.price.is_of_card for offer in shown):
        lines += paragraph("+ the card alone, at its launch price; the computer costs extra")
    lines += paragraph(
        "Prices in US dollars before tax, as the sources stated them. Check them before you buy:"
    )
    return lines + _sources(shown)


class _MachineTable:
    """The table's columns. A narrow terminal has no room for the quant."""

    def __init__(self, offers: Sequence[PricedMachine]) -> None:
        self._with_quant = width() >= _MIN_QUANT_WIDTH
        free_columns = width() - _FIGURE_COLUMNS
        if self._with_quant:
            free_columns -= _QUANT_COLUMNS + 1
        longest = max(len(offer.device.name) for offer in offers)
        self._machine = min(longest, free_columns * 3 // 5)
        self._model = free_columns - self._machine

    def head(self) -> str:
        quant = f"{'quant':{_QUANT_COLUMNS}} " if self._with_quant else ""
        machine = f"{'machine':{self._machine}}"
        return f"    {machine} {'price':>7} {'model':{self._model}} {quant}{'tok/s':>9} {'wait':>6}"

    def row(self, number: int, offer: PricedMachine) -> str:
        price = _dollars(offer.price.usd)
        if offer.price.is_of_card:
            price += "+"
        machine = clip(offer.device.name, self._machine)
        return f"{number:>3} {machine:{self._machine}} {price:>7} {self._pick(offer.plan)}"

    def _pick(self, plan: Plan | None) -> str:
        if plan is None:
            return "none fits and is fast enough"
        name = f"{clip(plan.model.name, self._model):{self._model}}"
        quant = ""
        if self._with_quant:
            marked_quant = clip(marked(plan, NONE_INSTALLED), _QUANT_COLUMNS)
            quant = f"{marked_quant:{_QUANT_COLUMNS}} "
        return f"{name} {quant}{speed(plan.stream_range):>9} {span(plan.ttft_s.value):>6}"


def _sources(offers: Sequence[PricedMachine]) -> list[str]:
    """Return a line for each source: the rows that it prices, the dates, and its address."""
    rows: dict[tuple[str, str], list[str]] = {}
    for number, offer in enumerate(offers, 1):
        rows.setdefault((offer.price.date, offer.price.source), []).append(str(number))
    return [f"  {', '.join(numbers)}: {date}, {source}" for (date, source), numbers in rows.items()]


def _dollars(usd: float) -> str:
    return f"${usd:,.0f}"
