"""Reasons in words: one sentence for each plan with its trade-offs, and one reason for each model
that is not offered."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from localllm.device.types import Device
from localllm.formatting import gb, rate, span
from localllm.planner import layer_bytes, scoring
from localllm.planner.scoring import Need
from localllm.planner.types import Plan


def does_not_fit_text(plan: Plan, device: Device) -> str:
    """Return "Q4_K_M needs 43.1 GB, this GPU has 31.2 GB usable", with the context that the need
    includes."""
    context = f"{plan.settings.n_ctx // 1024}k context"
    needs_memory = f"{plan.variant.quant} needs {gb(all_memory(plan))} at {context}"
    usable = gb(device.usable_bytes)
    if device.kind != "discrete":
        return f"{needs_memory}; this machine has {usable} usable"
    if device.host is None:
        return f"{needs_memory}; this GPU has {usable} usable"
    host = gb(device.host.limit_bytes)
    return f"{needs_memory}; this GPU has {usable} and {host} of system memory usable"


def disk_note(plan: Plan, tok_s: float) -> str | None:
    """Return "28.8 GB of tables stay on disk: …, on a disk that turns about 5.4 tok/s", or None
    if no tables do."""
    disk_bytes = plan.memory.disk_bytes
    if not disk_bytes:
        return None
    read_s = layer_bytes.token_s(
        plan.model, plan.variant, plan.settings, row_s=layer_bytes.SLOW_ROW_S
    )
    hard_disk_tok_s = 1 / (1 / tok_s + read_s)
    return (
        f"{gb(disk_bytes)} of tables stay on the disk, {plan.model.lookup_rows} rows "
        "a token, which "
        f"needs an SSD; a hard disk would give about {rate(hard_disk_tok_s)} tok/s"
    )


def host_parts(plan: Plan) -> str:
    """Return the parts of a split plan in system memory: "experts of 24 of 36 layers run"."""
    placement = plan.settings.placement
    n_layers = len(plan.model.layers)
    first_gpu_layer = placement.first_gpu_layer(n_layers)
    n_host_experts = placement.host_expert_layers(n_layers)
    parts = []
    if first_gpu_layer > 0:
        parts.append(f"{min(first_gpu_layer, n_layers)} of {n_layers} layers")
    if n_host_experts > first_gpu_layer and plan.model.experts is not None:
        parts.append(
            f"experts of {n_host_experts} of {n_layers} layers"
            if n_host_experts < n_layers
            else "all experts"
        )
    if placement.kv_on_host and first_gpu_layer < n_layers:
        parts.append("the KV cache")
    if not parts:
        return "a part of it runs"
    return f"{' and '.join(parts)} run"


def _host_part(plan: Plan) -> str:
    """Return "experts of 24 of 36 layers run from system memory, 40.0 GB"."""
    return f"{host_parts(plan)} from system memory, {gb(plan.memory.host_bytes)}"


def all_memory(plan: Plan) -> int:
    """Return the bytes in all memories, including those of a split plan in system memory."""
    return plan.memory.total_bytes + plan.memory.host_bytes


def too_slow_text(plan: Plan, need: Need) -> str:
    """Return "fits, but 0.6 tok/s is too slow for chat (5 needed)", or that the first token comes
    too late."""
    if plan.stream_tok_s >= need.least_tok_s:
        return (
            f"{plan.variant.quant} fits, but the first token of {need.prompt_tokens:,} tokens of "
            f"prompt takes {span(plan.ttft_s.value)}, too long for {need.purpose_text} "
            f"({span(need.ttft_longest_s)} at most)"
        )
    return (
        f"{plan.variant.quant} fits, but {rate(plan.stream_tok_s)} tok/s is too slow for "
        f"{need.purpose_text} ({need.least_tok_s:g} needed)"
    )


def variant_verdict(plan: Plan, device: Device, need: Need) -> str:
    """Return the verdict on one variant, for `recommend -m MODEL`."""
    if plan.fits == "no":
        return does_not_fit_text(plan, device)
    if scoring.too_slow(plan, need):
        return too_slow_text(plan, need)
    speed_and_context = f"{rate(plan.stream_tok_s)} tok/s; up to {plan.max_ctx // 1024}k context"
    if plan.fits == "split":
        return f"fits split: {_host_part(plan)}; {speed_and_context}"
    if plan.fits == "tight":
        return f"fits tightly; {speed_and_context}"
    return f"fits; {speed_and_context}"


def with_reasons(picks: Sequence[Plan], need: Need) -> list[Plan]:
    """Return the picks with `why` filled in: each is compared with the first pick and with the
    others."""
    return [plan._replace(why=_sentence(plan, picks, need)) for plan in picks]


def _sentence(plan: Plan, picks: Sequence[Plan], need: Need) -> str:
    first = picks[0]
    parts = []
    drafted_rate = rate(plan.stream_tok_s)
    plain_rate = rate(plan.decode_tok_s.value)
    if drafted_rate != plain_rate:
        parts.append(f"{drafted_rate} tok/s with drafts, {plain_rate} without")
    if not plan.is_rated:
        parts.append("no public score; its rank is estimated by size and age")
    elif plan.makers_own:
        parts.append("rated only by its publisher")
    parts.append(_main_advantage(plan, picks, need))
    is_slow = plan.stream_tok_s < need.good_tok_s
    good_speed = f"{need.good_tok_s:g} tok/s for comfortable reading"
    if len(picks) > 1 and all(p.stream_tok_s < need.good_tok_s for p in picks):
        # A fact about all picks is stated once, with the first.
        if plan is first:
            parts.append(f"all of these are slower than the {good_speed}")
    elif is_slow:
        parts.append(f"slower than the {good_speed}")
    return "; ".join([*parts, *_disadvantages(plan, first)])


def _rank_of_quality(plan: Plan) -> tuple[bool, float]:
    """Sort key: unrated plans below all rated ones."""
    return plan.is_rated, plan.quality


def _main_advantage(plan: Plan, picks: Sequence[Plan], need: Need) -> str:
    """Return the best property of a plan compared with the other picks."""
    first = picks[0]
    is_best = plan.is_rated and plan is max(picks, key=_rank_of_quality)
    if plan is first:
        if plan.score < 0:
            return (
                f"no better rated model runs here for {need.purpose_text}, although its waits "
                "cost more points than its rating"
            )
        if is_best:
            return f"best quality that is fast enough for {need.purpose_text}"
        return f"best balance of quality and speed for {need.purpose_text}"
    if is_best:
        if first.is_rated:
            return "best quality of these"
        return "the best rated of these"
    if plan is max(picks, key=attrgetter("stream_tok_s")):
        ratio = plan.stream_tok_s / first.stream_tok_s
        return f"fastest of these, {ratio:.1f}× the first"
    if plan is min(picks, key=all_memory):
        saved_bytes = all_memory(first) - all_memory(plan)
        return f"smallest of these, {gb(saved_bytes)} less than the first"
    return _better_than(first, plan)


def _better_than(first: Plan, plan: Plan) -> str:
    """Return the most important advantage of `plan` over the first pick."""
    ratio = plan.stream_tok_s / first.stream_tok_s
    more_points = plan.quality - first.quality
    saved_bytes = all_memory(first) - all_memory(plan)
    if ratio >= 1.25:
        return f"{ratio:.1f}× as fast as the first"
    if plan.is_rated and more_points > 0.5:
        return f"{more_points:.1f} points better than the first"
    if saved_bytes > 0.2 * all_memory(first):
        return f"needs {gb(saved_bytes)} less than the first"
    if ratio >= 1.01:
        return f"{ratio - 1:.0%} faster than the first"
    if saved_bytes > 0.01 * all_memory(first):
        return f"needs {gb(saved_bytes)} less than the first"
    return _small_advantage(first, plan)


def _small_advantage(first: Plan, plan: Plan) -> str:
    """Return an advantage of `plan` in its wait, context or rating."""
    more_points = plan.quality - first.quality
    sooner_share = 1 - plan.later_ttft_s / first.later_ttft_s
    if sooner_share > 0.01:
        return f"first token {sooner_share:.0%} sooner than the first"
    more_ctx = plan.settings.n_ctx - first.settings.n_ctx
    if more_ctx > 0:
        return f"{more_ctx // 1024}k more context than the first"
    if not plan.is_rated and more_points > 0:
        return f"it would have {more_points:.1f} points more than the first"
    if more_points > 0.05:
        return f"{more_points:.1f} points better than the first"
    if plan.is_rated and not first.is_rated:
        return "rated, unlike the first"
    if first.variant.is_estimate and not plan.variant.is_estimate:
        return "its files are listed; the first's are estimated"
    return "no better than the first in the listed figures"


def _disadvantages(plan: Plan, first: Plan) -> list[str]:
    """Return the disadvantages of `plan` other than its speed. The table lists its KV type."""
    disadvantages = []
    if plan.fits == "tight" or (plan.fits == "split" and plan.memory.fills_host):
        disadvantages.append("leaves little memory for anything else")
    if plan.fits == "split":
        disadvantages.append(_host_part(plan))
    lost_points = first.quality - plan.quality
    if plan.is_rated and first.is_rated and lost_points >= 1:
        disadvantages.append(
            f"rated {lost_points:.0f} point{'' if round(lost_points) == 1 else 's'} lower"
        )
    return disadvantages
