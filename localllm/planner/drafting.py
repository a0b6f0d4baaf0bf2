"""What drafting can bring to a plan: lookups in the text itself, the model's own heads, a second
model; and what of that counts for a purpose. Ranges, each with what it rests on: acceptance is the
text's, and only a measurement tells it (`python -m benchmarks.speculation`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from localllm.device.types import Device
from localllm.planner import decode_cost, memory, places
from localllm.planner.kernel_facts import facts as kernel_facts
from localllm.planner.speed import decode_step
from localllm.planner.streams import facts, streamed
from localllm.planner.types import USUAL, Plan, Range, RunSettings, Workload, backend_of
from localllm_catalog.types import Model, Variant

# While a given text is edited nearly every drafted token is right; free text accepts few, and the
# engine then drafts nothing. (`python -m benchmarks.speculation` measures both on the machine at hand.)
EDIT_ACCEPTANCE = 0.9
_LENGTHS = (2, 4, 8, 16)
_PAYS = 1.1
# Share of a coding agent's tokens that repeat a text it was given (assumed; from none to all in the
# range).
EDIT_SHARE = 0.25
# Of what an edit is predicted to gain at most, runs had so much: 0.36 and 0.25 (docs/recommend.md,
# two runs of SmolLM2).
_OF_MOST = 0.3
# Of what a model's own heads propose, the chance that a token is right if those before it were:
# prose, all together, code. From the published shares of four proposed tokens that were accepted:
# 0.40, 0.69 and 0.87 (github.com/sudoingX/qwen38-mtp).
HEADS_ACCEPTANCE = (0.64, 0.85, 0.95)
_HEADS_LENGTHS = (1, 2, 3, 4)
# Of a trained drafter's: assumed, from chat at a temperature to code that is greedy. What loses is
# left alone.
COMPANION_ACCEPTANCE = (0.4, 0.65, 0.85)
COMPANION_LENGTHS = (1, 2, 3, 5, 8)
COMPANION_BASIS = "drafter accepted at 40 to 85% a token, assumed; not measured here"
HEADS_SOURCE = "heads accepted at 64 to 95% a token, prose to code, as published of Qwen3.8-27B"
# Share of a same-family small model's tokens the large one accepts on chat and code; real ones run
# from 0.5 (free text) to 0.9 (edits of given text). The engine measures its own and stops drafting
# where it does not pay.
ASSUMED_ACCEPTANCE = 0.7
_DRAFT_LENGTH = 4


def speculation_gain(
    acceptance: float, length: int, draft_step_ratio: float, verify_ratio: float = 1.0
) -> float:
    """Speed-up of drafting `length` tokens: (1 − a^(g+1)) / (1 − a) tokens for g draft steps and
    one verification.

    `draft_step_ratio`: draft step ÷ target step; `verify_ratio`: step over g+1 tokens ÷ step over
    one. (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, eq. 1 and theorem 3.8.)
    """
    a = min(max(acceptance, 0.0), 0.999)
    return (1 - a ** (length + 1)) / (1 - a) / (length * draft_step_ratio + verify_ratio)


def draft_gain(
    device: Device, target: tuple[Model, Variant], draft: tuple[Model, Variant]
) -> float:
    """Predicted speed-up of letting `draft` propose four tokens a step (below 1 = slower)."""
    draft_s = decode_step(device, *draft, USUAL).total_s
    target_s = decode_step(device, *target, USUAL).total_s
    (verify,) = verify_ratios(device, *target, (_DRAFT_LENGTH + 1,))
    return speculation_gain(ASSUMED_ACCEPTANCE, _DRAFT_LENGTH, draft_s / target_s, verify)


def row_share(device: Device, variant: Variant) -> tuple[float, int]:
    """What a further token of one sequence adds to a step, as a share of it, and how many published
    runs say so (0: assumed)."""
    hardware = decode_cost.hardware_of(device, backend_of(variant).name)
    return kernel_facts(hardware.keys).row_share


# The same of mixtures, whose kernels and routing take the row as it comes until most experts are
# read anyway, on Apple's GPUs too: published gains of 1.1 (Qwen3.6-35B-A3B, RTX 5090), 1.35 (P40),
# 1.21 (M1 Max; ggml-org/llama.cpp#22673) and 1.26 (Step-3.5-Flash, MI50s; #23274), and a step over
# eight tokens of gpt-oss-120b takes an M2 Ultra as long as four (benches/mac-m2-ultra).
_MIXTURE_ROW_SHARE = 0.4


def verify_ratios(
    device: Device,
    model: Model,
    variant: Variant,
    rows: Sequence[int],
    settings: RunSettings = USUAL,
) -> list[float]:
    """How many plain steps a step over so many tokens of one sequence takes, for each of `rows`:
    weights are read once, but more of the experts, and every row is computed. Sequences of their
    own (`speed.decode`) cost more: each has a cache and a state.
    """
    hardware = decode_cost.hardware_of(device, backend_of(variant).name)
    read = streamed(model, variant)
    share, _ = row_share(device, variant)
    if hardware.engine != "cpu" and not read.routed_bytes:
        return [1 + (n - 1) * share for n in rows]
    one = decode_step(device, model, variant, settings)
    ratios = []
    for n in rows:
        if hardware.engine == "cpu":
            step = decode_step(device, model, variant, settings, n_sequences=n)
            ratios.append(step.total_s / one.total_s)
            continue
        more_bytes = read.step_bytes(model, decode_cost.apart(n)) - read.total_bytes
        more = more_bytes * (one.routed_s / one.total_s / read.routed_bytes)
        most = _MIXTURE_ROW_SHARE + (n - 1) * share + more
        ratios.append(1 + min((n - 1) * _MIXTURE_ROW_SHARE, most))
    return ratios


def edit_gain(device: Device, plan: Plan) -> float | None:
    """The most that drafts from the text itself can speed up an edit here: predicted, for
    `EDIT_ACCEPTANCE`.

    Drafting costs nothing; what limits it is the price of verifying several tokens at once. None
    where it does not pay, or where the model's memory can't take tokens back (recurrent layers,
    unless loaded with snapshots of their state).
    """
    if plan.settings.drafter.name == "off":
        return None
    lengths: tuple[int, ...] = _LENGTHS
    if facts(plan.model).n_recurrent_layers:
        if not plan.settings.n_rewind:
            return None
        lengths = (plan.settings.n_rewind,)
    (gain,) = _gains(device, plan, (EDIT_ACCEPTANCE,), dict.fromkeys(lengths, 0.0))
    return gain if gain >= _PAYS else None


def _gains(
    device: Device, plan: Plan, acceptances: Sequence[float], guesses: Mapping[int, float]
) -> list[float]:
    """The gain of the best length of a draft for each of these chances to be accepted; 1 if every
    length loses. `guesses`: the cost of a token of a draft by its length, in plain steps."""
    rows = [n + 1 for n in guesses]
    ratios = verify_ratios(device, plan.model, plan.variant, rows, plan.settings)
    best = []
    for acceptance in acceptances:
        gains = [
            speculation_gain(acceptance, n, guess, ratio)
            for (n, guess), ratio in zip(guesses.items(), ratios, strict=True)
        ]
        best.append(max(1.0, *gains))
    return best


def heads_gain(device: Device, plan: Plan) -> Range | None:
    """What the model's own draft heads (MTP) can bring one stream, with the number of tokens that
    suits best; None where it has none or its engine runs none. Several heads guess one token each,
    a recurrent model takes three back at most."""
    model = plan.model
    if not model.mtp_layers or not backend_of(plan.variant).draft_heads:
        return None
    read = streamed(model, plan.variant).total_bytes
    output = places.parts(model, plan.variant).output_bytes
    # A guess takes one layer and the output matrix.
    guess = min(1.0, output / max(1, read) + 1 / len(model.layers))
    lengths = [n for n in _HEADS_LENGTHS if n <= 3 or not facts(model).n_recurrent_layers]
    low, value, high = _gains(device, plan, HEADS_ACCEPTANCE, dict.fromkeys(lengths, guess))
    _, n_runs = row_share(device, plan.variant)
    source = HEADS_SOURCE
    if n_runs and plan.model.experts is None:
        source += f", {n_runs} of the runs on such machines"
    return Range(value, low, high, f"{source}; not measured here")


def companion_gain(device: Device, plan: Plan) -> Range | None:
    """What a drafter trained for the model can bring one stream; None without one. A guess streams
    the drafter's file once, or a block of them."""
    companion = plan.settings.drafter.companion
    if companion is None:
        return None
    read = streamed(plan.model, plan.variant).total_bytes
    guess = min(1.0, companion.file_bytes / max(1, read))
    block = companion.block
    if block:
        guesses = {n: guess / n for n in COMPANION_LENGTHS if n < block}
    else:
        guesses = dict.fromkeys(COMPANION_LENGTHS, guess)
    low, value, high = _gains(device, plan, COMPANION_ACCEPTANCE, guesses)
    return Range(value, low, high, COMPANION_BASIS)


def for_purpose(device: Device, plan: Plan, workload: Workload) -> Range | None:
    """How much faster the answers of this purpose come with the drafting of `plan`; None if that
    is not known to be any."""
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
    edits = edit_gain(device, plan)
    if edits is None:
        return None
    of_edits = 1 + _OF_MOST * (edits - 1)
    shared = 1 / (1 - EDIT_SHARE + EDIT_SHARE / of_edits)
    basis = f"{EDIT_SHARE:.0%} of the tokens are edits of given text, assumed"
    return Range(shared, 1.0, edits, basis)


def edit_sentence(device: Device, plan: Plan) -> str | None:
    """ "edits up to 3.1×: drafts come from the given text itself (90% accepted, assumed)"; of a
    recurrent model, which is loaded without snapshots, what `--draft ngram` would bring."""
    settings = plan.settings
    how = ""
    loaded = memory.rewind_for(plan.model, replace(settings.drafter, name="ngram"))
    if settings.drafter.name == "auto" and loaded and backend_of(plan.variant).snapshots:
        plan = replace(plan, settings=replace(settings, n_rewind=loaded))
        how = "with --draft ngram (which keeps snapshots of the state, for one stream) "
    gain = edit_gain(device, plan)
    if gain is None:
        return None
    accepted = f"{EDIT_ACCEPTANCE:.0%} accepted, assumed"
    return f"{how}edits up to {gain:.1f}×: drafts come from the given text itself ({accepted})"


def heads_sentence(device: Device, plan: Plan) -> str | None:
    """ "with --draft mtp (its own heads): 28 tok/s for one stream, 1.5 to 2.4× as fast (…)"; None
    if the model has no heads, or they gain little."""
    gain = heads_gain(device, plan)
    if gain is None or gain.value < _PAYS:
        return None
    if plan.settings.drafter.is_mtp:
        how = "its own heads draft"
    elif plan.variant.mtp_bytes:
        how = "with --draft mtp (its own heads)"
    else:
        how = "with --draft mtp (its own heads, from files that carry them)"
    rate = gain.value * plan.decode_tok_s.value
    return (
        f"{how}: {rate:.3g} tok/s for one stream, {gain.low:.1f} to {gain.high:.1f}× as fast "
        f"({gain.basis})"
    )


def companions_sentence(plan: Plan) -> str | None:
    """ "drafters published for it: dflash (org/name)"; None where none is known, or the engine
    reads GGUF drafters not."""
    if not plan.model.companions or not backend_of(plan.variant).draft_heads:
        return None
    drafters = ", ".join(f"{c.kind} ({c.repo})" for c in plan.model.companions)
    return f"drafters published for it: {drafters}"
