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
    references: Sequence[str | None],
    settings: Settings,
    settings_by_model: Sequence[Settings] | None = None,
) -> list[LoadPlan]:
    """Plan models that share this machine.

    The first model is planned for coding. Further models that support fill-in-the-middle are
    planned for autocomplete. Contexts that were not chosen are halved, the longest first, until all
    models fit in the machine's memory and in what is free now. If that is not enough, each model
    keeps the plan it would have alone, and the models take turns.

    `settings_by_model`: the settings of each model, if they differ. Raises the same errors as
    `load_plan_named`.
    """

    model_settings = settings_by_model or [settings] * len(references)
    models = [
        resolved(reference, own_settings)
        for reference, own_settings in zip(references, model_settings, strict=True)
    ]

    def planned(i: int, settings: Settings, purpose: Purpose) -> LoadPlan:
        return make_load_plan(models[i], settings, purpose, n_models=len(models))

    plans = [planned(i, own_settings, "coding") for i, own_settings in enumerate(model_settings)]
    for i, load in enumerate(plans[1:], 1):
        if load.fills_in:
            plans[i] = planned(i, model_settings[i], "autocomplete")
    if len(plans) == 1:
        return plans
    device = detect.detect()
    plans = one_card_each(plans, device)
    if _fits_one_card_each(plans, device):
        return plans
    return _with_shorter_contexts(plans, model_settings, planned)


def _with_shorter_contexts(
    plans: list[LoadPlan],
    settings: Sequence[Settings],
    planned: Callable[[int, Settings, Purpose], LoadPlan],
) -> list[LoadPlan]:
    """Halve contexts that were not chosen, the longest first, until all plans fit.

    Returns `plans` unchanged if that is not enough.
    """
    _, available = memory_for_models()
    adjustable = [
        i
        for i, load in enumerate(plans)
        if load.plan is not None and settings[i]["context"].automatic
    ]
    limits = [load.plan.memory.limit_bytes for load in plans if load.plan is not None]
    if not adjustable:
        return plans
    limit = min(available(), *limits)
    loads = list(plans)
    while not has_room(sum(load.needs_bytes for load in loads), limit):
        contexts = {i: loads[i].options.spec.n_ctx for i in adjustable}
        longest = max(adjustable, key=contexts.__getitem__)
        smaller = loads[longest].options.spec.n_ctx // 2
        if smaller < MIN_SHARED_CONTEXT:
            return plans
        purpose: Purpose = "coding"
        if longest and loads[longest].fills_in:
            purpose = "autocomplete"
        shorter = planned(longest, settings[longest].lowered("context", smaller), purpose)
        if shorter.options.spec.n_ctx >= loads[longest].options.spec.n_ctx:
            return plans
        loads[longest] = shorter
    return loads


def one_card_each(loads: Sequence[LoadPlan], device: Device) -> list[LoadPlan]:
    """Move models that fit on one card to the fastest card of `device` that has room.

    Each model was planned as if it were alone, so all were planned for the same card.
    """
    rates = {card.number: card.bandwidth_gbps.value for card in device.cards}
    left_bytes = {card.number: card.memory.limit_bytes for card in device.cards}
    moved_loads = []
    for load in loads:
        cards: tuple[int, ...] = ()
        if load.plan is not None:
            cards = load.plan.settings.placement.cards
        if (
            load.plan is not None
            and len(cards) == 1
            and load.needs_bytes > left_bytes.get(cards[0], load.needs_bytes)
        ):
            fitting = [
                number for number, free in left_bytes.items() if has_room(load.needs_bytes, free)
            ]
            if fitting:
                cards = (max(fitting, key=rates.__getitem__),)
            spec = load.options.spec
            plan = load.plan
            spec = replace(spec, placement=replace(spec.placement, cards=cards))
            plan = plan._replace(settings=plan.settings.placed(cards=cards))
            load = replace(load, options=replace(load.options, spec=spec), plan=plan)
        for number in cards or left_bytes:
            left_bytes[number] = left_bytes.get(number, 0) - load.needs_bytes // len(
                cards or left_bytes
            )
        moved_loads.append(load)
    return moved_loads


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
    own_device = device or detect.detect()

    def available() -> int:
        memory = detect.detect().memory
        if own_device.kind == "discrete":
            return memory.loadable_bytes
        free_bytes = free_for_models()
        if free_bytes is None:
            return memory.loadable_bytes
        return min(memory.loadable_bytes, free_bytes + memory.carve_out_bytes)

    return own_device.memory.limit_bytes, available
