"""What each purpose requires of a machine, and the score that compares plans for it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from localllm.formatting import span
from localllm.planner.types import MemoryNeed, Plan, Workload
from localllm_catalog.types import Model, Purpose


class Need(NamedTuple):
    """The requirements of a purpose, in tokens and tokens/s.

    - `least_tok_s`: a slower plan is not offered.
    - `good_tok_s`: speed up to here is worth points.
    - `ttft_good_s`: the same for the wait before an answer to `prompt_tokens`, with `cached_tokens`
      of them in the cache.
    - `ttft_longest_s`: the longest acceptable wait with an empty cache.
    - `thinking_tokens`: assumed length of thinking, for a model that thinks. `thinking_good_s`: how
      long that may take.
    - `context`: its initial context, which grows to `grown_context` (0: it does not grow).
    - `ttft_patient_s`: the wait for a whole prompt up to here costs no points (0: it never does).
      An agent has it in each session, for each subagent and after each change of the first lines,
      and a completion in each file.
    """

    context: int
    prompt_tokens: int
    cached_tokens: int
    least_tok_s: float
    good_tok_s: float
    ttft_good_s: float
    purpose_text: str
    ttft_longest_s: float
    thinking_tokens: int
    thinking_good_s: float
    grown_context: int = 0
    ttft_patient_s: float = 0.0


# People read 4-6 words a second: 6-8 tokens/s keeps up, 20 feels fluent. Users of an agent wait for
# its output and do not read it. A completion is useful within about a second: llama.vim's presets
# run a 7B above 16 GB, on GPUs that generate 25 tokens/s with it. The thinking
# lengths are assumed: makers' demonstrations and users' logs show from 100 tokens to many
# thousands. The longest waits are those after which people give up, or an agent's client times out.
# In a conversation, all but the last question is cached. In an edited text, all but the part after
# the cursor is cached. Each turn is assumed to have 256 new tokens.
_CHAT = Need(16384, 2048, 1792, 5.0, 20.0, 4.0, "chat", 60.0, 600, 20.0)
_CODING = Need(
    65536, 16384, 14336, 10.0, 40.0, 8.0, "a coding agent", 300.0, 400, 12.0, 131072, 150.0
)
_AUTOCOMPLETE = Need(
    8192, 2048, 1792, 20.0, 25.0, 1.0, "autocomplete", 10.0, 0, 1.0, ttft_patient_s=5.0
)
_LONG = Need(131072, 65536, 0, 4.0, 15.0, 60.0, "long documents", 900.0, 800, 30.0)
_REASONING = Need(32768, 2048, 1792, 10.0, 40.0, 6.0, "reasoning", 120.0, 2000, 60.0)
_EMBEDDING = Need(8192, 2048, 0, 1.0, 1.0, 2.0, "embeddings", 60.0, 0, 2.0)
NEEDS: dict[Purpose, Need] = {
    "chat": _CHAT,
    "coding": _CODING,
    "autocomplete": _AUTOCOMPLETE,
    "long": _LONG,
    "reasoning": _REASONING,
    "embedding": _EMBEDDING,
}


@lru_cache(maxsize=256)
def need_of(workload: Workload) -> Need:
    """Return the purpose's need with the user's own values applied."""
    need = NEEDS[workload.purpose]
    if workload.min_decode_tok_s > 0:
        need = need._replace(
            least_tok_s=workload.min_decode_tok_s,
            good_tok_s=max(need.good_tok_s, workload.min_decode_tok_s),
        )
    if workload.prompt_tokens != Workload().prompt_tokens:
        need = need._replace(prompt_tokens=workload.prompt_tokens, cached_tokens=0)
    return need


# Parameters of the smallest models that are offered for a purpose, and what smaller ones fail at:
# they write calls in a wrong form or repeat them, and miss most of what a long text says.
_SMALLEST: dict[Purpose, tuple[float, str]] = {
    "coding": (1.5e9, "call tools"),
    "long": (3e9, "read long documents"),
}


def unsuited(model: Model, workload: Workload) -> str | None:
    """Return why `model` is not made for this purpose, or None."""
    purpose = workload.purpose
    if purpose in ("chat", "reasoning"):
        return None if "chat" in model.purposes else "is not a chat model"
    if purpose == "long":
        return _unsuited_for_long(model, workload)
    if purpose in model.purposes:
        return _too_small(model, purpose)
    if purpose == "embedding":
        return "is not made for embedding"
    if purpose == "autocomplete" and not model.fim:
        return "has no fill-in-the-middle training"
    if purpose == "coding" and not model.calls_tools:
        return "is not trained to call tools"
    return _too_small(model, purpose)


def _too_small(model: Model, purpose: Purpose) -> str | None:
    smallest, skill = _SMALLEST.get(purpose, (0.0, ""))
    if model.params_total >= smallest:
        return None
    return f"has {model.params_total / 1e9:.2g} billion parameters: too few to {skill} reliably"


def _unsuited_for_long(model: Model, workload: Workload) -> str | None:
    wanted = min(_LONG.prompt_tokens, workload.context or _LONG.context)
    if 0 < model.native_context < wanted:
        length = f"{model.native_context // 1024}k tokens"
        return f"its context of {length} is too short for long documents"
    if "chat" not in model.purposes:
        return "is not a chat model"
    return _too_small(model, "long")


# Points lost for each doubling of the prompt's wait beyond a good one, and of the wait for
# thinking. Thinking tokens are generated like those of the answer, so being slow costs the same
# points (`score`).
_PROMPT_DOUBLED = 3.0
_THOUGHTS_DOUBLED = 5.0
# Thinking longer than this times a good wait costs three times as much for each doubling. Users
# avoid such a model: before a chat's answer it is 40 s.
_LONG_THOUGHTS = 2.0
_LONG_THOUGHTS_MORE = 2.0
# The same of a wait for the prompt longer than this times a good one.
_LONG_PROMPT = 4.0
# Points lost for each doubling of the wait for a whole prompt beyond `ttft_patient_s`.
_WHOLE_DOUBLED = 3.0


def thinking_tokens(model: Model, need: Need) -> int:
    """Return how many tokens `model` is assumed to think before it answers; 0 if it does not think.

    A hybrid model counts as thinking, since its scores are for that mode.
    """
    if model.reasoning_kind == "none":
        return 0
    return need.thinking_tokens


def answer_s(plan: Plan, need: Need) -> float:
    """Return the seconds until the answer begins: the uncached part of the prompt, then the
    thinking."""
    return plan.later_ttft_s + thinking_tokens(plan.model, need) / plan.stream_tok_s


def prompt_lost(plan: Plan, need: Need) -> float:
    """Return the points lost by the wait for the uncached prompt, compared with a good wait, and by
    the wait for a whole one, if the purpose often has it."""
    share = plan.later_ttft_s / need.ttft_good_s
    doubled = math.log2(max(1.0, share)) + math.log2(max(1.0, share / _LONG_PROMPT))
    lost = _PROMPT_DOUBLED * doubled
    if need.ttft_patient_s:
        whole_share = plan.ttft_s.value / need.ttft_patient_s
        lost += _WHOLE_DOUBLED * math.log2(max(1.0, whole_share))
    return lost


def points_lost(plan: Plan, need: Need) -> float:
    """Return the points lost by waiting for the prompt and for the thinking, each compared with a
    good wait."""
    return prompt_lost(plan, need) + thinking_lost(plan.model, plan.stream_tok_s, need)


def thinking_lost(model: Model, tok_s: float, need: Need) -> float:
    """Return the points lost by waiting for the thinking at `tok_s`, compared with a good wait."""
    share = thinking_tokens(model, need) / tok_s / need.thinking_good_s
    doubled = math.log2(max(1.0, share))
    doubled += _LONG_THOUGHTS_MORE * math.log2(max(1.0, share / _LONG_THOUGHTS))
    return _THOUGHTS_DOUBLED * doubled


def speed_points(tok_s: float, need: Need) -> float:
    """Return the points gained by decoding at `tok_s`, compared with the good speed; negative if it
    is slower."""
    doublings = math.log2(tok_s / need.good_tok_s)
    if doublings < 0:
        return _SLOW_COST * doublings
    return min(_MAX_FAST_GAIN, _FAST_GAIN * doublings)


# Points lost by a tight plan, and by one split over two memories. A tight plan in memory that other
# programs use too may not load, or slow all of them down. In a card's own memory it only has no
# room for a context that grows, which an agent's does. A split plan fills memory that other
# programs use, and its speed is the least certain.
_TIGHT_COST = 6.0
_TIGHT_CARD_COST = 2.0
_TIGHT_CARD_GROWS_COST = 4.0
SPLIT_COST = 4.0
# Bytes of system memory that other programs are assumed to need, in addition to those of an idle
# system. A split plan loses a point for each GB that is missing.
_OTHERS_BYTES = 6_000_000_000
# Points lost for each card after the first, since another model could use it. Also lost if some of
# several cards are nearly full.
_CARD_COST = 0.25
# Points lost per point of uncertainty above that of a well measured model. An unrated new model
# does not outrank known ones.
_UNCERTAINTY_COST = 1.25
_KNOWN_SPREAD = 1.5
# Points lost when speed halves below the good speed, points gained when it doubles above, and the
# most to gain.
_SLOW_COST = 5.0
_FAST_GAIN = 0.25
_MAX_FAST_GAIN = 1.0
# Share of its points that a file loses if its name and size are constructed. A listed file within
# this share ranks above it.
_ESTIMATE_COST = 0.03


def score(plan: Plan, need: Need) -> float:
    """Return the points of a plan: its quality, less 5 for each halving of speed below the good
    speed, plus a quarter for each doubling above it (1 at most).

    More speed than that gains little for a reader, and the wait for thinking counts separately.

    Speed is that of the purpose's answers, with the plan's own drafting. `points_lost` counts the
    wait for the answer, including thinking. A plan that fits tightly loses 6 points. In a card's
    own memory it loses 2, or 4 if the purpose's context grows, or a quarter if it leaves a card
    free. A plan split over two memories loses 4, in addition to its lower speed. It loses one
    more for each GB of system memory that other programs then lack. Each card after the first costs
    a quarter. Files that are not listed lose 3 % of the result.
    """
    points = plan.quality
    points -= _UNCERTAINTY_COST * max(0.0, plan.quality_spread - _KNOWN_SPREAD)
    rate = plan.decode_tok_s.value
    if plan.drafting is not None:
        rate *= plan.drafting.value
    points += speed_points(rate, need)
    points -= points_lost(plan, need)
    if plan.fits == "tight":
        points -= _tight_cost(plan, need)
    if plan.fits == "split":
        points -= SPLIT_COST + _crowding_cost(plan.memory)
    points -= _CARD_COST * max(0, len(plan.memory.cards_bytes) - 1)
    if plan.variant.is_estimate:
        points -= _ESTIMATE_COST * abs(points)
    return round(points, 4)


def _tight_cost(plan: Plan, need: Need) -> float:
    if plan.settings.placement.cards:
        return _CARD_COST
    if plan.memory.host_bytes:
        return _TIGHT_CARD_GROWS_COST if need.grown_context else _TIGHT_CARD_COST
    return _TIGHT_COST


def _crowding_cost(need: MemoryNeed) -> float:
    if not need.host_limit_bytes:
        return 0.0
    left_bytes = need.host_limit_bytes - need.host_bytes
    return max(0, _OTHERS_BYTES - left_bytes) / 1e9


def context_can_grow(plan: Plan, need: Need) -> bool:
    """Return whether the plan's context can grow to the length of a long session for this purpose."""
    most = min(need.grown_context, plan.model.native_context or need.grown_context)
    more_bytes = max(0, most - plan.settings.n_ctx) * plan.kv_bytes_per_1k / 1024
    need_of_plan = plan.memory
    growth = 1 + more_bytes / need_of_plan.total_bytes
    taken_bytes = need_of_plan.cards_bytes or (need_of_plan.total_bytes,)
    limits_bytes = need_of_plan.cards_limit_bytes or (need_of_plan.limit_bytes,)
    return all(n * growth <= most for n, most in zip(taken_bytes, limits_bytes, strict=False))


def too_long(plan: Plan, need: Need) -> bool:
    """Return whether the first token after an uncached prompt comes too late for the purpose."""
    return plan.ttft_s.value > need.ttft_longest_s


def too_slow(plan: Plan, need: Need) -> bool:
    """Return whether the plan's speed, or its wait for the first token, is unacceptable for the
    purpose."""
    return plan.stream_tok_s < need.least_tok_s or too_long(plan, need)


def sentence(plan: Plan, need: Need) -> str | None:
    """Return "thinks first, about 600 tokens (assumed): its answer begins after 13 s", or None if
    it does not think."""
    tokens = thinking_tokens(plan.model, need)
    if not tokens:
        return None
    return (
        f"thinks first, about {tokens:,} tokens (assumed): its answer begins after "
        f"{span(answer_s(plan, need))}"
    )
