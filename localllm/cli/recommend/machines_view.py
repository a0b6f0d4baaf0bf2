"""Format several machines: a comparison of their plans, or those that run one model at a speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from localllm.cli.recommend.page import clip, paragraph, speed, width
from localllm.cli.recommend.view import NONE_INSTALLED, heading, marked, numbered_rows
from localllm.device.types import Device, device_to_json
from localllm.formatting import gb, rate
from localllm.plain_output import ascii_json
from localllm.planner.recommend import Reach
from localllm.planner.serialise import recommendation_to_json
from localllm.planner.types import Plan, Recommendation
from localllm_catalog.types import Model

# Number of plans per machine in a comparison.
_PLANS_COMPARED = 4


def comparison(
    devices: Sequence[Device],
    answers: Sequence[Recommendation],
    plan_on: Callable[[int, Model], Plan | None],
    *,
    as_json: bool,
) -> list[str]:
    """Compare machines: the best plans of each, and the speeds of all those models on every
    machine.

    `plan_on` plans a model on the machine of that index, if it is not among that machine's plans.
    """
    answers_by_device = list(zip(devices, answers, strict=True))
    if as_json:
        found = [
            recommendation_to_json(answer, device_to_json(device))
            for device, answer in answers_by_device
        ]
        return [ascii_json({"machines": found})]
    lines: list[str] = []
    for device, answer in answers_by_device:
        head, rows = numbered_rows(answer.plans[:_PLANS_COMPARED], NONE_INSTALLED)
        lines += [*heading(device, "Best"), head, *rows, ""]
    rows_of = _rates_on_all(answers, plan_on)
    if not rows_of:
        return lines
    names = " / ".join(machine.name for machine in devices)
    lines += paragraph(
        f"tok/s of each machine's models on every machine, in the best format there: {names}"
    )
    for name, row in rows_of.items():
        cells = "  ".join(f"{cell:>6}" for cell in row)
        lines.append(f"  {clip(name, 30):30} {cells}")
    if any("–" in row for row in rows_of.values()):
        lines.append("  –: too large for the machine, or too slow for the purpose")
    return lines


def _rates_on_all(
    answers: Sequence[Recommendation], plan_on: Callable[[int, Model], Plan | None]
) -> dict[str, list[str]]:
    """Return tokens per second of each machine's best models on every machine, by model name."""
    best = chain.from_iterable(answer.plans[:_PLANS_COMPARED] for answer in answers)
    models = {plan.model.id: plan.model for plan in best}
    rows: dict[str, list[str]] = {}
    for model in models.values():
        row = rows[model.name] = []
        for i, answer in enumerate(answers):
            picked = next(
                (other_plan for other_plan in answer.plans if other_plan.model.id == model.id), None
            )
            plan = picked or plan_on(i, model)
            row.append(rate(plan.decode_tok_s.value) if plan else "–")
    return rows


_MAX_REACHING_SHOWN = 24


def reach(model: Model, tok_s: float, found: Reach, *, as_json: bool) -> list[str]:
    """Format the machines that run a model at a speed, slowest memory first, and the nearest
    miss."""
    if as_json:
        machines = [
            {
                "device": machine.name,
                "quant": machine_plan.variant.quant,
                "backend": machine_plan.backend,
                "fits": machine_plan.fits,
                "decode_tok_s": round(machine_plan.decode_tok_s.value, 1),
                "memory_bytes": machine_plan.memory.total_bytes,
            }
            for machine, machine_plan in found.found
        ]
        return [ascii_json({"model": model.id, "at_tok_s": tok_s, "machines": machines})]
    lines = paragraph(
        f"{model.name} at {rate(tok_s)} tok/s or more, each machine with its smallest memory size"
    )
    if found.found:
        lines += _reach_rows(found)
    else:
        lines.append("  no machine in the table reaches that")
    if found.nearest is not None:
        device, plan = found.nearest
        lines += paragraph(
            f"the fastest machine that can hold it is too slow: {device.name}, "
            f"{plan.decode_tok_s.value:.2f} tok/s ({plan.variant.quant})"
        )
    return lines


def _reach_rows(found: Reach) -> list[str]:
    columns = min(max(len(device.name) for device, _ in found.found), width() - 42)
    lines = [f"  {'machine':{columns}} {'GB/s':>6} {'quant':12} {'memory':>9} {'tok/s':>9}"]
    for device, plan in found.found[:_MAX_REACHING_SHOWN]:
        name = clip(device.name, columns)
        quant = clip(marked(plan, NONE_INSTALLED), 12)
        memory = gb(plan.memory.total_bytes)
        lines.append(
            f"  {name:{columns}} {device.bandwidth_gbps.value:>6,.0f} {quant:12} "
            f"{memory:>9} {speed(plan.decode_tok_s):>9}"
        )
    n_more = len(found.found) - _MAX_REACHING_SHOWN
    if n_more > 0:
        lines.append(f"  … and {n_more} with faster memory (--json lists all)")
    return lines
