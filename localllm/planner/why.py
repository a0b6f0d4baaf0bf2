"""One sentence per plan: why this one, and what it trades. And one reason per model that is not offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.device.types import Device
from localllm.planner.needs import Need
from localllm.planner.types import Plan


def gb(n_bytes: float) -> str:
    """Decimal gigabytes as people read them: 43.1 GB, 0.27 GB."""
    value = n_bytes / 1e9
    return f"{value:.1f} GB" if value >= 1 else f"{value:.2f} GB"


def rate(tok_s: float) -> str:
    """Tokens per second: three figures are enough."""
    return f"{tok_s:.0f}" if tok_s >= 20 else f"{tok_s:.1f}"


def place(device: Device) -> str:
    """What the memory is of, for a sentence: this GPU, this machine."""
    return "this GPU" if device.kind == "discrete" else "this machine"


def does_not_fit(plan: Plan, device: Device) -> str:
    """ "Q4_K_M needs 43.1 GB, this GPU has 31.2 GB usable" (context named, since it is part of the need)."""
    needed = plan.memory.total_bytes + plan.memory.host_bytes
    usable = device.memory.limit_bytes
    at = f"at {plan.settings.n_ctx // 1024}k context"
    return f"{plan.variant.quant} needs {gb(needed)} {at}, {place(device)} has {gb(usable)} usable"


def is_too_slow(plan: Plan, need: Need) -> str:
    """ "fits, but 0.6 tok/s is too slow for chat (5 needed)"."""
    return (
        f"{plan.variant.quant} fits, but {rate(plan.decode_tok_s.value)} tok/s is too slow for {need.what} "
        f"({need.least_tok_s:g} needed)"
    )


def of_variant(plan: Plan, device: Device, need: Need) -> str:
    """The verdict on one variant, for `recommend -m MODEL`."""
    if plan.fits == "no":
        return does_not_fit(plan, device)
    if plan.decode_tok_s.value < need.least_tok_s:
        return is_too_slow(plan, need)
    head = {"yes": "fits", "tight": "fits tightly", "split": "fits split over GPU and system memory"}[plan.fits]
    return f"{head}; {rate(plan.decode_tok_s.value)} tok/s; up to {plan.max_ctx // 1024}k context"


def explained(picks: Sequence[Plan], need: Need) -> list[Plan]:
    """The picks with `why` filled in: each compared with the first and with the one above it."""
    if not picks:
        return []
    fastest = max(picks, key=lambda p: p.decode_tok_s.value)
    smallest = min(picks, key=lambda p: p.memory.total_bytes)
    best_quality = max(picks, key=lambda p: p.quality)
    # What is true of every pick is said once, with the first.
    all_slow = len(picks) > 1 and fastest.decode_tok_s.value < need.good_tok_s
    return [replace(p, why=_sentence(p, picks[0], fastest, smallest, best_quality, need, all_slow)) for p in picks]


def _sentence(plan: Plan, first: Plan, fastest: Plan, smallest: Plan, best: Plan, need: Need, all_slow: bool) -> str:
    praise = _praise(plan, first, fastest, smallest, best, need)
    if all_slow and plan is first:
        trade = f"all of these are slower than the {need.good_tok_s:g} tok/s that feel good"
    else:
        trade = _trade(plan, first, need, all_slow)
    return f"{praise}; {trade}" if trade else praise


def _praise(plan: Plan, first: Plan, fastest: Plan, smallest: Plan, best: Plan, need: Need) -> str:
    if plan is first:
        if plan is best:
            return f"best quality that is fast enough for {need.what}"
        return f"best balance of quality and speed for {need.what}"
    if plan is best:
        return "best quality of all that fit"
    if plan is fastest:
        return f"fastest of these, {plan.decode_tok_s.value / first.decode_tok_s.value:.1f}× the first"
    if plan is smallest:
        return f"smallest of these, {gb(first.memory.total_bytes - plan.memory.total_bytes)} less than the first"
    ratio = plan.decode_tok_s.value / first.decode_tok_s.value
    if ratio >= 1.25:
        return f"{ratio:.1f}× as fast as the first"
    if plan.quality > first.quality + 0.5:
        return "better than the first where quality matters most"
    saved = first.memory.total_bytes - plan.memory.total_bytes
    if saved > 0.2 * first.memory.total_bytes:
        return f"needs {gb(saved)} less than the first"
    if plan.model.licence and plan.model.licence != first.model.licence:
        return f"another maker's take ({plan.model.licence})"
    return "next in rank"


def _trade(plan: Plan, first: Plan, need: Need, all_slow: bool) -> str:
    if plan.decode_tok_s.value < need.good_tok_s and not all_slow:
        return f"slower than the {need.good_tok_s:g} tok/s that feel good"
    if plan.fits == "tight":
        return "leaves little memory for anything else"
    if plan.fits == "split":
        return "part of it runs from system memory"
    if plan.settings.kv_type not in ("f16", "bf16", "f32"):
        return f"needs a {plan.settings.kv_type} cache to fit"
    lost = first.quality - plan.quality
    if plan is not first and lost >= 1:
        return f"{lost:.0f} points less on the quality index"
    return ""
