"""One sentence per plan: why this one, and what it trades. And one reason per model that is not
offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.device.types import Device
from localllm.formatting import gb, rate, span
from localllm.planner import needs, places
from localllm.planner.needs import Need
from localllm.planner.types import Plan


def does_not_fit(plan: Plan, device: Device) -> str:
    """ "Q4_K_M needs 43.1 GB, this GPU has 31.2 GB usable" (context named, since it is part of the
    need)."""
    needed = all_memory(plan)
    place = "this GPU" if device.kind == "discrete" else "this machine"
    usable = gb(device.room_bytes)
    at = f"at {plan.settings.n_ctx // 1024}k context"
    beside = ""
    if device.kind == "discrete" and device.host is not None:
        beside = f" and {gb(device.host.limit_bytes)} of system memory"
    return f"{plan.variant.quant} needs {gb(needed)} {at}; {place} has {usable}{beside} usable"


def on_disk(plan: Plan, tok_s: float) -> str | None:
    """ "28.8 GB of tables stay on the disk: …, on one that turns about 5.4 tok/s"; None where
    nothing does."""
    left = plan.memory.disk_bytes
    slow = places.SLOW_ROW_S
    if not left:
        return None
    turning = 1 / (1 / tok_s + places.token_s(plan.model, plan.variant, plan.settings, row_s=slow))
    return (
        f"{gb(left)} of tables stay on the disk, {plan.model.lookup_rows} rows a token: that "
        "wants an SSD, "
        f"on a disk that turns about {rate(turning)} tok/s"
    )


def left_behind(plan: Plan) -> str:
    """What of a split plan lies in system memory: "experts of 24 of 36 layers run"."""
    placed = plan.settings.placement
    n = len(plan.model.layers)
    first = placed.first_gpu_layer(n)
    kept = placed.host_expert_layers(n)
    parts = (
        (first > 0, f"{min(first, n)} of {n} layers"),
        (
            kept > first and plan.model.experts is not None,
            f"experts of {kept} of {n} layers" if kept < n else "all experts",
        ),
        (placed.kv_on_host and first < n, "the KV cache"),
    )
    said = [text for is_left, text in parts if is_left]
    return (" and ".join(said) or "part of it") + (" run" if said else " runs")


def _beside(plan: Plan) -> str:
    """ "experts of 24 of 36 layers run from system memory, 40.0 GB"."""
    return f"{left_behind(plan)} from system memory, {gb(plan.memory.host_bytes)}"


def all_memory(plan: Plan) -> int:
    """Bytes in every memory: what a divided plan has in system memory is needed too."""
    return plan.memory.total_bytes + plan.memory.host_bytes


def is_too_slow(plan: Plan, need: Need) -> str:
    """ "fits, but 0.6 tok/s is too slow for chat (5 needed)", or the first token comes too late."""
    if plan.stream_tok_s >= need.least_tok_s:
        return (
            f"{plan.variant.quant} fits, but the first token of {need.prompt_tokens:,} comes after "
            f"{span(plan.ttft_s.value)}, too late for {need.what} "
            f"({span(need.ttft_longest_s)} at most)"
        )
    return (
        f"{plan.variant.quant} fits, but {rate(plan.stream_tok_s)} tok/s is too slow for "
        f"{need.what} "
        f"({need.least_tok_s:g} needed)"
    )


def of_variant(plan: Plan, device: Device, need: Need) -> str:
    """The verdict on one variant, for `recommend -m MODEL`."""
    if plan.fits == "no":
        return does_not_fit(plan, device)
    if plan.stream_tok_s < need.least_tok_s or needs.too_long(plan, need):
        return is_too_slow(plan, need)
    head = {"yes": "fits", "tight": "fits tightly", "split": f"fits split: {_beside(plan)}"}[
        plan.fits
    ]
    return f"{head}; {rate(plan.stream_tok_s)} tok/s; up to {plan.max_ctx // 1024}k context"


def explained(picks: Sequence[Plan], need: Need) -> list[Plan]:
    """The picks with `why` filled in: each compared with the first and with the one above it."""
    if not picks:
        return []
    fastest = max(picks, key=lambda p: p.stream_tok_s)
    smallest = min(picks, key=all_memory)
    # What nobody has rated is the best of nothing.
    best_quality = max(picks, key=lambda p: (p.is_rated, p.quality))
    # What is true of every pick is said once, with the first.
    all_slow = len(picks) > 1 and fastest.stream_tok_s < need.good_tok_s
    return [
        replace(p, why=_sentence(p, picks[0], fastest, smallest, best_quality, need, all_slow))
        for p in picks
    ]


def _sentence(
    plan: Plan, first: Plan, fastest: Plan, smallest: Plan, best: Plan, need: Need, all_slow: bool
) -> str:
    praise = _praise(plan, first, fastest, smallest, best, need)
    if not plan.is_rated:
        praise = f"no public score, its rank a guess by size and age; {praise}"
    elif plan.makers_own:
        praise = f"rated by its maker alone; {praise}"
    slower = f"slower than the {need.good_tok_s:g} tok/s that feel good"
    if all_slow:
        slower = f"all of these are {slower}" if plan is first else ""
    elif plan.stream_tok_s >= need.good_tok_s:
        slower = ""
    return "; ".join(filter(None, [praise, slower, *_trades(plan, first)]))


def _praise(plan: Plan, first: Plan, fastest: Plan, smallest: Plan, best: Plan, need: Need) -> str:
    sure = plan is best and plan.is_rated
    saved = gb(all_memory(first) - all_memory(plan))
    said = (
        (
            plan is first and plan.score < 0,
            f"nothing surer runs here for {need.what}, though its waits cost more points than it "
            "has",
        ),
        (plan is first and sure, f"best quality that is fast enough for {need.what}"),
        (plan is first, f"best balance of quality and speed for {need.what}"),
        (sure and first.is_rated, "best quality of these"),
        (sure, "the best of these that somebody rated"),
        (
            plan is fastest,
            f"fastest of these, {plan.stream_tok_s / first.stream_tok_s:.1f}× the first",
        ),
        (plan is smallest, f"smallest of these, {saved} less than the first"),
    )
    return next((text for is_so, text in said if is_so), None) or _better_than(first, plan)


def _better_than(first: Plan, plan: Plan) -> str:
    """What `plan` has over the first, the most telling of it; that there is something is why it is
    among the picks."""
    ratio = plan.stream_tok_s / first.stream_tok_s
    better = plan.quality - first.quality
    saved = all_memory(first) - all_memory(plan)
    sooner = (
        1 - (plan.ttft_cached_s or plan.ttft_s).value / (first.ttft_cached_s or first.ttft_s).value
    )
    longer = plan.settings.n_ctx - first.settings.n_ctx
    said = (
        (ratio >= 1.25, f"{ratio:.1f}× as fast as the first"),
        (plan.is_rated and better > 0.5, f"{better:.1f} points better than the first"),
        (saved > 0.2 * all_memory(first), f"needs {gb(saved)} less than the first"),
        (ratio >= 1.01, f"{ratio - 1:.0%} faster than the first"),
        (saved > 0.01 * all_memory(first), f"needs {gb(saved)} less than the first"),
        (sooner > 0.01, f"first token {sooner:.0%} sooner than the first"),
        (longer > 0, f"{longer // 1024}k more context than the first"),
        (not plan.is_rated and better > 0, f"that would be {better:.1f} points above the first"),
        (better > 0.05, f"{better:.1f} points better than the first"),
        (plan.is_rated and not first.is_rated, "rated, which the first is not"),
        (
            first.variant.is_estimate and not plan.variant.is_estimate,
            "its files are listed, the first's constructed",
        ),
    )
    return next(
        (text for is_so, text in said if is_so), "no better than the first in anything shown"
    )


def _trades(plan: Plan, first: Plan) -> list[str]:
    """What `plan` has against it beside its speed. Its KV type stands in the table."""
    drafted = rate(plan.stream_tok_s)
    plain = rate(plan.decode_tok_s.value)
    lost = first.quality - plan.quality
    points = f"{lost:.0f} point{'' if round(lost) == 1 else 's'}"
    said = (
        (drafted != plain, f"{drafted} tok/s with what drafts for it, {plain} without"),
        (plan.fits == "tight", "leaves little memory for anything else"),
        (plan.fits == "split", _beside(plan)),
        (plan.is_rated and first.is_rated and lost >= 1, f"rated {points} lower"),
    )
    return [text for is_so, text in said if is_so]
