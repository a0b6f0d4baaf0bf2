"""How several machines look: side by side, each with its picks, or those that run one model at a
speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from localllm.cli.recommend.page import clip, speed, width, wrapped
from localllm.cli.recommend.view import NOTHING, heading, marked, numbered_rows
from localllm.device.types import Device, device_to_json
from localllm.formatting import gb, rate
from localllm.plain_output import ascii_json
from localllm.planner.recommend import Reach
from localllm.planner.serialise import recommendation_to_json
from localllm.planner.types import Plan, Recommendation
from localllm_catalog.types import Model

# Plans of each machine where machines are compared.
_COMPARED = 4


def comparison(
    devices: Sequence[Device],
    answers: Sequence[Recommendation],
    elsewhere: Callable[[int, Model], Plan | None],
    *,
    as_json: bool,
) -> list[str]:
    """Machines side by side: each one's best plans, and what is picked on any of them on all of
    them. `elsewhere`: the plan of a model on the machine of that number, where it is not among its
    picks."""
    if as_json:
        both = [
            recommendation_to_json(a, device_to_json(d))
            for d, a in zip(devices, answers, strict=True)
        ]
        return [ascii_json({"machines": both})]
    lines: list[str] = []
    for device, answer in zip(devices, answers, strict=True):
        head, rows = numbered_rows(answer.plans[:_COMPARED], NOTHING)
        lines += [*heading(device, "Best"), head, *rows, ""]
    rows_of = _rates_on_all(answers, elsewhere)
    if not rows_of:
        return lines
    names = " / ".join(d.name for d in devices)
    lines += wrapped(f"tok/s of each on all, in the best format there: {names}", further="  ")
    for name, row in rows_of.items():
        lines.append(f"  {clip(name, 30):30} " + "  ".join(f"{cell:>6}" for cell in row))
    if any("–" in row for row in rows_of.values()):
        lines.append("  –: too large for it, or too slow for the purpose")
    return lines


def _rates_on_all(
    answers: Sequence[Recommendation], elsewhere: Callable[[int, Model], Plan | None]
) -> dict[str, list[str]]:
    """Tokens per second of each machine's best models on every machine, by the models' names."""
    best = chain.from_iterable(answer.plans[:_COMPARED] for answer in answers)
    models = {plan.model.id: plan.model for plan in best}
    rows: dict[str, list[str]] = {}
    for model in models.values():
        row = rows[model.name] = []
        for i, answer in enumerate(answers):
            picked = next((p for p in answer.plans if p.model.id == model.id), None)
            plan = picked or elsewhere(i, model)
            row.append(rate(plan.decode_tok_s.value) if plan else "–")
    return rows


_REACH_SHOWN = 24


def reach(model: Model, tok_s: float, found: Reach, *, as_json: bool) -> list[str]:
    """The machines that run a model at a speed, slowest memory first, and the one that nearly
    does."""
    if as_json:
        machines = [
            {
                "device": d.name,
                "quant": p.variant.quant,
                "backend": p.backend,
                "fits": p.fits,
                "decode_tok_s": round(p.decode_tok_s.value, 1),
                "memory_bytes": p.memory.total_bytes,
            }
            for d, p in found.found
        ]
        return [ascii_json({"model": model.id, "at_tok_s": tok_s, "machines": machines})]
    lines = wrapped(
        f"{model.name} at {rate(tok_s)} tok/s or more, each part in its smallest memory size",
        further="  ",
    )
    if not found.found:
        lines.append("  no machine of the table reaches that")
    else:
        name = min(max(len(d.name) for d, _ in found.found), width() - 42)
        lines.append(f"  {'machine':{name}} {'GB/s':>6} {'quant':12} {'memory':>9} {'tok/s':>9}")
        for device, plan in found.found[:_REACH_SHOWN]:
            lines.append(
                "  "
                f"{clip(device.name, name):{name}} {device.bandwidth_gbps.value:>6,.0f} {clip(marked(plan, NOTHING), 12):12} "
                f"{gb(plan.memory.total_bytes):>9} {speed(plan.decode_tok_s):>9}"
            )
        if len(found.found) > _REACH_SHOWN:
            lines.append(
                f"  … and {len(found.found) - _REACH_SHOWN} with faster memory (--json lists all)"
            )
    if found.nearest is not None:
        device, plan = found.nearest
        text = (
            f"the fastest that holds it and does not: {device.name}, "
            f"{plan.decode_tok_s.value:.2f} tok/s"
        )
        lines += wrapped(f"{text} ({plan.variant.quant})", further="  ")
    return lines
