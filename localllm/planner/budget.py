"""Rank machines with a price by the best plan of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from localllm.device.types import Device, Price
from localllm.planner.recommend import recommend
from localllm.planner.starting_settings import NO_OVERRIDES, Overrides
from localllm.planner.types import Plan, Workload
from localllm_catalog.types import Model


@dataclass(frozen=True, slots=True)
class PricedMachine:
    """A machine, its price, and its first pick (None: no model fits and is fast enough)."""

    price: Price
    device: Device
    plan: Plan | None


def ranked(
    machines: Iterable[tuple[Price, Device]],
    models: Sequence[Model],
    workload: Workload,
    overrides: Overrides = NO_OVERRIDES,
    on_machine: Callable[[Device], object] | None = None,
) -> list[PricedMachine]:
    """Return the machines, best first: by the points of their first pick, which count the model,
    its speed and its wait. The cheaper of two equal ones is first.

    `on_machine` gets each machine before it is planned.
    """
    priced_machines = []
    for price, device in machines:
        if on_machine is not None:
            on_machine(device)
        answer = recommend(device, models, workload, overrides=overrides, limit=1)
        priced_machines.append(PricedMachine(price, device, next(iter(answer.plans), None)))
    return sorted(priced_machines, key=_rank)


def _rank(offer: PricedMachine) -> tuple[float, int, str]:
    points = float("-inf")
    if offer.plan is not None:
        points = offer.plan.score
    return -points, offer.price.usd, offer.device.name
