"""Predict the gain from drafting: lookups in the context itself, the model's own heads, or a second
model.

Also selects the gain that counts for a purpose. All results are ranges with their basis, since the
acceptance rate depends on the text and must be measured (`python -m benchmarks.speculation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from localllm.device.types import Device
from localllm.planner import decode_cost, draft_cost, memory
from localllm.planner.bytes_per_token import facts, streamed
from localllm.planner.speed import decode_step
from localllm.planner.types import USUAL, Plan, Range, RunSettings, Workload, backend_of
from localllm_catalog.types import Model, Variant

# When a given text is edited, nearly every drafted token is accepted. Free text accepts few, and
# the engine then stops drafting. (`python -m benchmarks.speculation` measures both on this
# machine.)
EDIT_ACCEPTANCE = 0.9
_LOOKUP_LENGTHS = (2, 4, 8, 16)
_MIN_GAIN = 1.1
# Share of a coding agent's tokens that repeat a text from its prompt (assumed; the range covers 0
# to 1).
EDIT_SHARE = 0.25
# Share of the predicted maximum gain that runs reached in edits: 0.36 and 0.25 (docs/recommend.md,
# two runs of SmolLM2).
_EDIT_GAIN_SHARE = 0.3
# Chance that a token from the model's own heads is right if those before it were. The values are
# for prose, for all texts, and for code. The first and last derive from published acceptance rates
# of four proposed tokens: 0.40 and 0.87 (github.com/sudoingX/qwen38-mtp). The middle one is the
# median of 14 published runs with two to four tokens, which have 0.76 to 0.92.
HEADS_ACCEPTANCE = (0.64, 0.82, 0.95)
_HEADS_LENGTHS = (1, 2, 3, 4)
# The same for a trained drafter: assumed, from chat at a temperature to greedy code. A drafter that
# loses is not used.
COMPANION_ACCEPTANCE = (0.4, 0.65, 0.85)
COMPANION_LENGTHS = (1, 2, 3, 5, 8)
COMPANION_BASIS = "40 to 85% of the drafter's tokens accepted, assumed; not measured here"
HEADS_SOURCE = (
    "64 to 95% of the heads' tokens accepted, from prose to code, as published for Qwen3.8-27B"
)
# Share of tokens from a small model of the same family that the large one accepts on chat and code.
# Real models range from 0.5 (free text) to 0.9 (edits of given text). The engine measures its own
# share and stops drafting if it does not pay.
ASSUMED_ACCEPTANCE = 0.7
_DRAFT_LENGTH = 4


def speculation_gain(
    acceptance: float, length: int, draft_step_ratio: float, verify_ratio: float = 1.0
) -> float:
    """Return the speed-up of drafting `length` tokens: (1 − a^(g+1)) / (1 − a) tokens for g draft
    steps and one verification.

    `draft_step_ratio` is draft step ÷ target step. `verify_ratio` is a step over g+1 tokens ÷ a
    step over one. (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, eq. 1 and theorem 3.8.)
    """
    clamped_acceptance = min(max(acceptance, 0.0), 0.999)
    return (
        (1 - clamped_acceptance ** (length + 1))
        / (1 - clamped_acceptance)
        / (length * draft_step_ratio + verify_ratio)
    )


def draft_gain(
    device: Device, target: tuple[Model, Variant], draft: tuple[Model, Variant] | None
) -> float:
    """Return the predicted speed-up if `draft` proposes four tokens a step (below 1 = slower; 1
    without a draft model)."""
    if draft is None:
        return 1.0
    draft_s = decode_step(device, *draft, USUAL).total_s
    target_s = decode_step(device, *target, USUAL).total_s
    (verify,) = verify_ratios(device, *target, (_DRAFT_LENGTH + 1,))
    return speculation_gain(ASSUMED_ACCEPTANCE, _DRAFT_LENGTH, draft_s / target_s, verify)


# The cost of one more row of a mixture, as a share of a step. Their kernels and routing add a full
# row's cost until most experts are read anyway. This holds on Apple's GPUs too: published gains are
# 1.1 (Qwen3.6-35B-A3B, RTX 5090), 1.35 (P40), 1.21 (M1 Max; ggml-org/llama.cpp#22673) and 1.26
# (Step-3.5-Flash, MI50s; #23274). On an M2 Ultra, a step over eight tokens of gpt-oss-120b takes as
# long as four steps (benches/mac-m2-ultra).
_MIXTURE_ROW_SHARE = 0.4


def verify_ratios(
    device: Device,
    model: Model,
    variant: Variant,
    rows: Sequence[int],
    settings: RunSettings = USUAL,
) -> list[float]:
    """Return the cost of verifying a draft, for each count in `rows`: a step over so many tokens of
    one sequence, in decode steps without drafts.

    Weights are read once, but more experts are read and each row is computed. Rows of separate
    sequences (`speed.decode`) cost more, since each has its own cache and state.
    """
    hardware = decode_cost.hardware_of(device, backend_of(variant).name)
    read = streamed(model, variant)
    single_step = decode_step(device, model, variant, settings)
    row_share = draft_cost.draft_seconds(model, variant, hardware)["row"] / single_step.total_s
    if hardware.engine != "cpu" and not read.routed_bytes:
        return [1 + (n_rows - 1) * row_share for n_rows in rows]
    ratios = []
    for n_rows in rows:
        if hardware.engine == "cpu":
            step = decode_step(device, model, variant, settings, n_sequences=n_rows)
            ratios.append(step.total_s / single_step.total_s)
            continue
        further_bytes = (
            read.step_bytes(model, decode_cost.routed_sequences(n_rows)) - read.total_bytes
        )
        experts_share = further_bytes * (
            single_step.routed_s / single_step.total_s / read.routed_bytes
        )
        ratio_limit = _MIXTURE_ROW_SHARE + (n_rows - 1) * row_share + experts_share
        ratios.append(1 + min((n_rows - 1) * _MIXTURE_ROW_SHARE, ratio_limit))
    return ratios


def edit_gain(device: Device, plan: Plan) -> float | None:
    """Return the largest predicted speed-up of an edit from lookup drafts, at `EDIT_ACCEPTANCE`.

    Lookups are free; the limit is the cost of verifying several tokens at once. Returns None if
    drafting does not pay. Also returns None if the model cannot take tokens back (recurrent layers
    loaded without snapshots of their state).
    """
    if plan.settings.drafter.name == "off":
        return None
    lengths: tuple[int, ...] = _LOOKUP_LENGTHS
    if facts(plan.model).n_recurrent_layers:
        if not plan.settings.n_rewind:
            return None
        lengths = (plan.settings.n_rewind,)
    (gain,) = _gains(device, plan, (EDIT_ACCEPTANCE,), dict.fromkeys(lengths, 0.0))
    return gain if gain >= _MIN_GAIN else None


def _gains(
    device: Device, plan: Plan, acceptances: Sequence[float], guesses: Mapping[int, float]
) -> list[float]:
    """Return the gain of the best draft length for each acceptance rate, or 1 if every length
    loses.

    `guesses` maps a draft's length to the cost of one drafted token, in decode steps without
    drafts.
    """
    rows = [n_tokens + 1 for n_tokens in guesses]
    ratios = verify_ratios(device, plan.model, plan.variant, rows, plan.settings)
    best_gains = []
    for acceptance in acceptances:
        gains = [
            speculation_gain(acceptance, n_tokens, guess_cost, ratio)
            for (n_tokens, guess_cost), ratio in zip(guesses.items(), ratios, strict=True)
        ]
        best_gains.append(max(1.0, *gains))
    return best_gains


def heads_gain(device: Device, plan: Plan) -> Range | None:
    """Return the gain of the model's own draft heads (MTP) for one stream, at the best draft
    length.

    Returns None if the model has no heads or its engine does not run them. Several heads guess one
    token each. A recurrent model takes back at most three tokens.
    """
    model = plan.model
    if not model.mtp_layers or not backend_of(plan.variant).draft_heads:
        return None
    hardware = decode_cost.hardware_of(device, backend_of(plan.variant).name)
    step_s = decode_step(device, model, plan.variant, plan.settings).total_s
    host_s = draft_cost.draft_seconds(model, plan.variant, hardware)["guess"]
    guess_cost = draft_cost.guess_share(model, plan.variant) + host_s / step_s
    lengths = [
        n_tokens
        for n_tokens in _HEADS_LENGTHS
        if n_tokens <= 3 or not facts(model).n_recurrent_layers
    ]
    low, value, high = _gains(device, plan, HEADS_ACCEPTANCE, dict.fromkeys(lengths, guess_cost))
    n_runs = draft_cost.n_runs(hardware)
    source = HEADS_SOURCE
    if n_runs and plan.model.experts is None:
        source += f", {n_runs} of the runs on such machines"
    return Range(value, low, high, f"{source}; not measured here")


def companion_gain(device: Device, plan: Plan) -> Range | None:
    """Return the gain of a drafter trained for the model, for one stream; None without a drafter.
    Each guess, or each block of guesses, reads the drafter's file once."""
    companion = plan.settings.drafter.companion
    if companion is None:
        return None
    read_bytes = streamed(plan.model, plan.variant).total_bytes
    guess_cost = min(1.0, companion.file_bytes / max(1, read_bytes))
    block_tokens = companion.block
    if block_tokens:
        guesses = {
            n_tokens: guess_cost / n_tokens
            for n_tokens in COMPANION_LENGTHS
            if n_tokens < block_tokens
        }
    else:
        guesses = dict.fromkeys(COMPANION_LENGTHS, guess_cost)
    low, value, high = _gains(device, plan, COMPANION_ACCEPTANCE, guesses)
    return Range(value, low, high, COMPANION_BASIS)


def for_purpose(device: Device, plan: Plan, workload: Workload) -> Range | None:
    """Return the predicted speed-up of answers for this purpose with the drafting of `plan`, or
    None if no gain is known."""
    drafter = plan.settings.drafter
    if drafter.is_mtp:
        return heads_gain(device, plan)
    if drafter.companion is not None:
        return companion_gain(device, plan)
    if drafter.second is not None:
        gain = plan.draft_gain
        basis = f"{ASSUMED_ACCEPTANCE:.0%} of its tokens accepted, assumed"
        return Range(gain, min(1.0, gain), gain, basis)
    if workload.purpose != "coding":
        return None
    max_edit_gain = edit_gain(device, plan)
    if max_edit_gain is None:
        return None
    usual_edit_gain = 1 + _EDIT_GAIN_SHARE * (max_edit_gain - 1)
    gain_of_answers = 1 / (1 - EDIT_SHARE + EDIT_SHARE / usual_edit_gain)
    basis = f"{EDIT_SHARE:.0%} of the tokens are edits of given text, assumed"
    return Range(gain_of_answers, 1.0, max_edit_gain, basis)


def edit_sentence(device: Device, plan: Plan) -> str | None:
    """Return "edits up to 3.1×: drafts are copied from the given text (90% accepted, assumed)".

    For a recurrent model, which is loaded without snapshots, return the gain that `--draft ngram`
    would bring. Returns None if drafting does not pay.
    """
    settings = plan.settings
    how_to_enable = ""
    n_rewind = memory.rewind_for(plan.model, replace(settings.drafter, name="ngram"))
    if settings.drafter.name == "auto" and n_rewind and backend_of(plan.variant).snapshots:
        plan = plan._replace(settings=replace(settings, n_rewind=n_rewind))
        how_to_enable = "with --draft ngram (one stream, with snapshots of the state) "
    gain = edit_gain(device, plan)
    if gain is None:
        return None
    accepted = f"{EDIT_ACCEPTANCE:.0%} accepted, assumed"
    return (
        f"{how_to_enable}edits up to {gain:.1f}×: drafts are copied from the "
        f"given text ({accepted})"
    )


def heads_sentence(device: Device, plan: Plan) -> str | None:
    """Return "with --draft mtp (its MTP heads): 28 tok/s for one stream, 1.5 to 2.4× as fast (…)".
    Returns None if the model has no heads or they gain little."""
    gain = heads_gain(device, plan)
    if gain is None or gain.value < _MIN_GAIN:
        return None
    if plan.settings.drafter.is_mtp:
        how_to_enable = "its MTP heads draft"
    elif plan.variant.mtp_bytes:
        how_to_enable = "with --draft mtp (its MTP heads)"
    else:
        how_to_enable = "with --draft mtp (its MTP heads, from files that contain them)"
    rate = gain.value * plan.decode_tok_s.value
    return (
        f"{how_to_enable}: {rate:.3g} tok/s for one stream, {gain.low:.1f} to "
        f"{gain.high:.1f}× as fast "
        f"({gain.basis})"
    )


def companions_sentence(plan: Plan) -> str | None:
    """Return "drafters published for it: dflash (org/name)". Returns None if no drafter is known
    for the engine."""
    of_folder = plan.variant.is_folder
    fitting = [c for c in plan.model.companions if c.folder == of_folder]
    drafters = [f"{companion.kind} ({companion.repo})" for companion in fitting]
    if not drafters:
        return None
    return f"drafters published for it: {', '.join(drafters)}"
