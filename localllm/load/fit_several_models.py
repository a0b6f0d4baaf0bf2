"""Plan models that share this machine: the memory for them, and contexts that fit together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from localllm.device import detect
from localllm.device.types import Device
from localllm.load.load_plan import LoadPlan, make_load_plan, resolved
from localllm.memory.system import free_for_models
from localllm.memory.verdict import Part, has_room, verdict
from localllm.settings import Settings
from localllm_catalog.types import Purpose

# Models that share a machine reduce their contexts to no less than this many tokens. If that is not
# enough, they take turns.
MIN_SHARED_CONTEXT = 4096


def load_plans_together(
    references: Sequence[str | None], settings: Settings, own: Sequence[Settings] | None = None
) -> list[LoadPlan]:
    """Plan models that share this machine.

    The first model is planned for coding. Further models that support fill-in-the-middle are
    planned for autocomplete. Contexts that were not chosen are halved, the largest first, until all
    models fit in the machine's memory and in what is free now. If that is not enough, each model
    keeps the plan it would have alone, and the models take turns.

    `own`: the settings of each model, if they differ. Raises the same errors as `load_plan_named`.
    """

    each = own or [settings] * len(references)
    models = [resolved(r, s) for r, s in zip(references, each, strict=True)]

    def planned(i: int, settings: Settings, purpose: Purpose) -> LoadPlan:
        return make_load_plan(models[i], settings, purpose, of=len(models))

    plans = [planned(i, s, "coding") for i, s in enumerate(each)]
    for i, load in enumerate(plans[1:], 1):
        if load.fills_in:
            plans[i] = planned(i, each[i], "autocomplete")
    if len(plans) == 1:
        return plans
    device = detect.detect()
    plans = one_card_each(plans, device)
    if _fits_one_card_each(plans, device):
        return plans
    return _with_shorter_contexts(plans, each, planned)


def _with_shorter_contexts(
    plans: list[LoadPlan],
    settings: Sequence[Settings],
    planned: Callable[[int, Settings, Purpose], LoadPlan],
) -> list[LoadPlan]:
    """Halve contexts that were not chosen, the largest first, until all plans fit.

    Returns `plans` unchanged if that is not enough.
    """
    _, available = memory_for_models()
    free = [
        i
        for i, load in enumerate(plans)
        if load.plan is not None and settings[i]["context"].automatic
    ]
    limits = [load.plan.memory.limit_bytes for load in plans if load.plan is not None]
    if not free:
        return plans
    limit = min(available(), *limits)
    shared = list(plans)
    while not has_room(sum(load.needs_bytes for load in shared), limit):
        contexts = {i: shared[i].options.spec.n_ctx for i in free}
        at = max(free, key=contexts.__getitem__)
        smaller = shared[at].options.spec.n_ctx // 2
        if smaller < MIN_SHARED_CONTEXT:
            return plans
        purpose: Purpose = "coding"
        if at and shared[at].fills_in:
            purpose = "autocomplete"
        lowered = planned(at, settings[at].lowered("context", smaller), purpose)
        if lowered.options.spec.n_ctx >= shared[at].options.spec.n_ctx:
            return plans
        shared[at] = lowered
    return shared


def one_card_each(loads: Sequence[LoadPlan], device: Device) -> list[LoadPlan]:
    """Move models that fit on one card to the fastest card of `device` that has room.

    Each model was planned as if it were alone, so all were planned for the same card.
    """
    rates = {card.number: card.bandwidth_gbps.value for card in device.cards}
    left = {card.number: card.memory.limit_bytes for card in device.cards}
    placed = []
    for load in loads:
        cards: tuple[int, ...] = ()
        if load.plan is not None:
            cards = load.plan.settings.placement.cards
        if (
            load.plan is not None
            and len(cards) == 1
            and load.needs_bytes > left.get(cards[0], load.needs_bytes)
        ):
            fitting = [number for number, free in left.items() if has_room(load.needs_bytes, free)]
            if fitting:
                cards = (max(fitting, key=rates.__getitem__),)
            spec = load.options.spec
            plan = load.plan
            spec = replace(spec, placement=replace(spec.placement, cards=cards))
            plan = plan._replace(settings=plan.settings.placed(cards=cards))
            load = replace(load, options=replace(load.options, spec=spec), plan=plan)
        for number in cards or left:
            left[number] = left.get(number, 0) - load.needs_bytes // len(cards or left)
        placed.append(load)
    return placed


def _fits_one_card_each(loads: Sequence[LoadPlan], device: Device) -> bool:
    """True if every model has one card, and each card has enough memory for its models."""
    bytes_on_card: dict[int, int] = {}
    for load in loads:
        if load.plan is None or len(load.plan.settings.placement.cards) != 1:
            return False
        (number,) = load.plan.settings.placement.cards
        bytes_on_card[number] = bytes_on_card.get(number, 0) + load.needs_bytes
    limits = {card.number: card.memory.limit_bytes for card in device.cards}
    parts = [
        Part(f"card {n}", bytes_on_card.get(n, 0), limit, limit) for n, limit in limits.items()
    ]
    return not verdict(parts).short_parts


def memory_for_models(device: Device | None = None) -> tuple[int, Callable[[], int]]:
    """Return the memory for all models in bytes, and a function for the part available now.

    If the pool is shared with the system, the function returns what the memory guard would allow.
    `device`: this machine, if it was read already.
    """
    machine = device or detect.detect()

    def available() -> int:
        memory = detect.detect().memory
        if machine.kind == "discrete":
            return memory.loadable_bytes
        shared = free_for_models()
        if shared is None:
            return memory.loadable_bytes
        return min(memory.loadable_bytes, shared + memory.carve_out_bytes)

    return machine.memory.limit_bytes, available
