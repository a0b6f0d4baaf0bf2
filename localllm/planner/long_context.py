"""Find what makes a long context fit: a KV type of the same model, another model, or a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from localllm.device.types import Device
from localllm.planner import kv_sizes, quality
from localllm.planner.plan import max_context
from localllm.planner.recommend import recommend
from localllm.planner.starting_settings import Overrides
from localllm.planner.types import Plan, Workload
from localllm_catalog.types import Model

_KV_TYPES = ("f16", "q8_0", "q4_0")
_MODELS_SHOWN = 5
# The most points that a file may lose to its format (four bits and more do).
_SMALL_LOSS_POINTS = 1.0


@dataclass(frozen=True, slots=True)
class KvChoice:
    """A KV type, and the longest context in tokens that fits with it."""

    kv_type: str
    max_ctx: int


@dataclass(frozen=True, slots=True)
class LongContext:
    """What makes `tokens` of context fit.

    - `plan`: the model's usual plan on this machine; None if no file of it fits.
    - `choices`: its KV types with the longest context of each.
    - `others`: plans of models that hold so many tokens here, best first.
    - `machine`: the machine with the least memory that holds them with `model`, and its plan. None
      if no known machine does, or the model was trained for less.
    """

    model: Model
    tokens: int
    plan: Plan | None
    choices: tuple[KvChoice, ...]
    others: tuple[Plan, ...]
    machine: tuple[Device, Plan] | None


def find(
    device: Device,
    machines: Iterable[Device],
    models: Sequence[Model],
    model: Model | None,
    tokens: int,
    overrides: Overrides,
) -> LongContext | None:
    """Return what makes `tokens` of context fit for `model` (None: the first pick for chat).

    Returns None if `model` is None and no model fits at all.
    """
    first_pick = recommend(
        device, [model] if model else models, Workload(), overrides=overrides, limit=1
    )
    plan = next(iter(first_pick.plans), None)
    if plan is not None:
        model = plan.model
    if model is None:
        return None
    recommendation = recommend(
        device, models, Workload(context=tokens), overrides=overrides, limit=_MODELS_SHOWN
    )
    choices: tuple[KvChoice, ...] = ()
    if plan is not None:
        choices = tuple(
            KvChoice(kv_type, _max_ctx(device, plan, kv_type))
            for kv_type in _KV_TYPES
            if kv_sizes.kv_type_allowed(model, kv_type)
        )
    machine = None
    if not model.native_context or model.native_context >= tokens:
        machine = _least_machine(machines, model, tokens)
    return LongContext(model, tokens, plan, choices, recommendation.plans, machine)


def _is_format_loss_small(plan: Plan) -> bool:
    return quality.format_cost(plan.model, plan.variant) <= _SMALL_LOSS_POINTS


def _max_ctx(device: Device, plan: Plan, kv_type: str) -> int:
    settings = plan.settings.with_kv_type(kv_type)
    return max_context(device, plan._replace(settings=settings))


def _least_machine(
    machines: Iterable[Device], model: Model, tokens: int
) -> tuple[Device, Plan] | None:
    """Return the machine with the least memory that runs `model` with so many tokens, with room and
    in a file that loses little to its format."""
    workload = Workload(context=tokens)
    for device in sorted(machines, key=attrgetter("usable_bytes", "bandwidth_gbps.value", "name")):
        for plan in recommend(device, [model], workload, limit=1).plans:
            if plan.fits == "yes" and _is_format_loss_small(plan):
                return device, plan
    return None
