"""How long an answer lets one wait: the prompt, what a thinking model thinks first, and what is too long for a purpose."""

from __future__ import annotations

import math

from localllm.planner.needs import Need
from localllm.planner.types import Plan
from localllm_catalog.types import Model

# Points that every doubling of a wait beyond what feels good costs.
_POINTS_PER_DOUBLING = 2.0


def thinking_tokens(model: Model, need: Need) -> int:
    """Tokens `model` is assumed to think before it answers; 0 for one that does not.

    A hybrid counts as thinking: its scores are those it has when it thinks.
    """
    return 0 if model.reasoning_kind == "none" else need.thinking_tokens


def answer_s(plan: Plan, need: Need) -> float:
    """Seconds until the answer itself begins: the part of the prompt that is not cached, then the thoughts."""
    wait = (plan.ttft_cached_s or plan.ttft_s).value
    return wait + thinking_tokens(plan.model, need) / plan.decode_tok_s.value


def points_lost(plan: Plan, need: Need) -> float:
    """What waiting costs on the quality index: for the prompt and for the thoughts, each against what feels good."""
    prompt_s = (plan.ttft_cached_s or plan.ttft_s).value
    thoughts_s = answer_s(plan, need) - prompt_s
    doublings = math.log2(max(1.0, prompt_s / need.ttft_good_s))
    doublings += math.log2(max(1.0, thoughts_s / need.thinking_good_s))
    return _POINTS_PER_DOUBLING * doublings


def too_long(plan: Plan, need: Need) -> bool:
    """True where the first token of a whole prompt comes later than the purpose can live with."""
    return plan.ttft_s.value > need.ttft_longest_s


def span(seconds: float) -> str:
    """0.4 s, 12 s, 3.1 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def sentence(plan: Plan, need: Need) -> str | None:
    """ "thinks first, about 600 tokens (assumed): its answer begins after 13 s"; None for one that does not think."""
    tokens = thinking_tokens(plan.model, need)
    if not tokens:
        return None
    return f"thinks first, about {tokens:,} tokens (assumed): its answer begins after {span(answer_s(plan, need))}"
