"""The answer to `recommend --device "2x dgx spark"`: the models that joined machines hold only
together, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localllm.cli.recommend.page import clip, paragraph, speed, width, wrapped
from localllm.device.types import Device
from localllm.formatting import gb
from localllm.plain_output import ascii_json
from localllm.planner.cluster import Link
from localllm.planner.joined_models import JoinedPick
from localllm.planner.types import Plan

_MAX_SHOWN = 8
# Columns of a row without the model's name.
_ROW_COLUMNS = 50


@dataclass(frozen=True, slots=True)
class JoinedAnswer:
    """What joined machines can run. `device_text` is the value of --device, and `alone` is the best
    first pick of one of the machines by itself."""

    device_text: str
    devices: Sequence[Device]
    link: Link
    picks: Sequence[JoinedPick]
    alone: Plan | None


def as_json(joined_answer: JoinedAnswer) -> list[str]:
    """Return one JSON text with every pick."""
    answer = {
        "devices": [device.name for device in joined_answer.devices],
        "usable_bytes": [device.usable_bytes for device in joined_answer.devices],
        "link": joined_answer.link.name,
        "models": [_json(pick) for pick in joined_answer.picks],
        "alone": None if joined_answer.alone is None else _alone_json(joined_answer.alone),
    }
    return [ascii_json(answer)]


def _alone_json(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model.id,
        "quant": plan.variant.quant,
        "points": round(plan.quality, 1),
    }


def _json(pick: JoinedPick) -> dict[str, Any]:
    quant_alone = None if pick.alone is None else pick.alone.quant
    return {
        "model": pick.model.id,
        "quant": pick.variant.quant,
        "points": round(pick.points, 1),
        "n_ctx": pick.plan.settings.n_ctx,
        "needs_bytes": pick.plan.needs_bytes,
        "decode_tok_s": pick.plan.decode_tok_s._asdict(),
        "prefill_tok_s": pick.plan.prefill_tok_s._asdict(),
        "quant_alone": quant_alone,
        "gained_points": round(pick.gained_points, 1),
    }


def lines(answer: JoinedAnswer, *, everything: bool) -> list[str]:
    """Return the list of the best picks, or of `everything`."""
    usable_bytes = sum(device.usable_bytes for device in answer.devices)
    names = " + ".join(device.name for device in answer.devices)
    title = f"Models that only these machines together hold: {names}, {answer.link.name}"
    text_lines = [*paragraph(title), f"{gb(usable_bytes)} for a model on all of them", ""]
    if answer.picks:
        shown = answer.picks if everything else answer.picks[:_MAX_SHOWN]
        text_lines += [*_rows(shown), ""]
        if len(shown) < len(answer.picks):
            text_lines.insert(-1, f"    … and {len(answer.picks) - len(shown)} more (--all)")
    else:
        text_lines += ["none of the catalog, at a speed that suffices for this purpose", ""]
    text_lines += paragraph(
        "The machines compute their layers in turn, so a model that one of them holds decodes no "
        "faster on all of them."
    )
    if answer.alone is not None:
        text_lines += paragraph(_comparison_with_one(answer.alone, answer.picks))
    if answer.picks:
        command = (
            f'localllm recommend --device "{answer.device_text}" -m {answer.picks[0].model.id}'
        )
        text_lines.append(f"One in detail: {command}")
    return text_lines


def _comparison_with_one(plan: Plan, picks: Sequence[JoinedPick]) -> str:
    """Return the first pick of one machine, and how it compares with that of all machines."""
    text = (
        f"One of them alone runs {plan.model.name} {plan.variant.quant} at "
        f"{speed(plan.stream_range)} tok/s"
    )
    if picks:
        text += f", {_rating_text(plan.quality - picks[0].points)} than the first of these"
    return text


def _rows(picks: Sequence[JoinedPick]) -> list[str]:
    """Format the header, and each pick with its reason."""
    longest = max(len(pick.model.name) for pick in picks)
    columns = max(5, min(longest, width() - _ROW_COLUMNS))
    rows = [f"    {'model':{columns}} {'quant':12} {'memory':>8} {'tok/s':>9} {'prompt tok/s':>13}"]
    for number, pick in enumerate(picks, 1):
        plan = pick.plan
        rows.append(
            f"{number:>3} {clip(pick.model.name, columns):{columns}} "
            f"{clip(pick.variant.quant, 12):12} {gb(plan.needs_bytes):>8} "
            f"{speed(plan.decode_tok_s):>9} {speed(plan.prefill_tok_s):>13}"
        )
        rows += wrapped(_reason(pick, picks[0]), "    ", "    ")
    return rows


def _reason(pick: JoinedPick, first: JoinedPick) -> str:
    """Return what joining the machines gains, and how the pick compares with the first."""
    reason = "fits on none of them alone"
    if pick.alone is not None:
        reason = (
            f"one of them alone holds {pick.alone.quant}, "
            f"{_rating_text(-pick.gained_points)} by its format"
        )
    if pick is first:
        return f"{reason}; best balance of quality and speed"
    return f"{reason}; {_rating_text(pick.points - first.points)} than the first"


def _rating_text(points: float) -> str:
    """Format a difference of ratings, such as "rated 2.1 points lower"."""
    direction = "lower" if points < 0 else "higher"
    return f"rated {abs(points):.1f} points {direction}"
