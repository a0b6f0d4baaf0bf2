"""What drafting from the text itself can bring to a plan: the n-gram lookup that `--draft auto` always has."""

from __future__ import annotations

from localllm.device.types import Device
from localllm.planner import speed
from localllm.planner.facts import facts
from localllm.planner.types import Plan

# While a given text is edited nearly every drafted token is right; free text accepts few, and the engine then drafts
# nothing. (`localllm bench --speculation` measures both on the machine at hand.)
EDIT_ACCEPTANCE = 0.9
_LENGTHS = (2, 4, 8, 16)
_PAYS = 1.1


def edit_gain(device: Device, plan: Plan) -> float | None:
    """The most that drafts from the text itself can speed up an edit here: predicted, for `EDIT_ACCEPTANCE`.

    Drafting costs nothing; what limits it is the price of verifying several tokens at once (the step's own prediction
    for as many sequences). None where it does not pay, or where the model's memory can't take tokens back (recurrent
    layers, as they are loaded).
    """
    if facts(plan.model).n_recurrent_layers or plan.settings.drafter.name == "off":
        return None
    one = _step_s(device, plan, 1)
    gain = max(speed.speculation_gain(EDIT_ACCEPTANCE, n, 0.0, _step_s(device, plan, n + 1) / one) for n in _LENGTHS)
    return gain if gain >= _PAYS else None


def _step_s(device: Device, plan: Plan, rows: int) -> float:
    return 1 / speed.decode(device, plan.model, plan.variant, plan.settings, n_sequences=rows).value


def edit_sentence(device: Device, plan: Plan) -> str | None:
    """ "edits of given text up to 3.1× as fast, drafted from the text itself (90 % accepted, assumed)"."""
    gain = edit_gain(device, plan)
    if gain is None:
        return None
    return f"edits up to {gain:.1f}×: drafts come from the given text itself ({EDIT_ACCEPTANCE:.0%} accepted, assumed)"
