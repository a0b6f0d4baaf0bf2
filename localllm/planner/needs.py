"""What each purpose asks of a machine, and the one sum of points by which plans are compared for
it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from localllm.formatting import span
from localllm.planner.types import Plan, Workload
from localllm_catalog.types import Model, Purpose


@dataclass(frozen=True, slots=True)
class Need:
    """Tokens and tokens/s. Below `least_tok_s` a plan is not offered; up to `good_tok_s` more speed
    is worth points.

    `ttft_good_s` likewise for the wait before an answer to `prompt_tokens`, of which
    `cached_tokens` were seen before; with nothing cached, nobody waits longer than `ttft_longest_s`
    for it. A model that thinks is assumed to think `thinking_tokens` first, which feels good within
    `thinking_good_s`. What is begun with `context` grows to `grown_context` (0: not beyond it).
    """

    context: int
    prompt_tokens: int
    cached_tokens: int
    least_tok_s: float
    good_tok_s: float
    ttft_good_s: float
    what: str
    ttft_longest_s: float
    thinking_tokens: int
    thinking_good_s: float
    grown_context: int = 0


# People read 4-6 words a second: 6-8 tokens/s keeps up, 20 feels fluent; an agent's output is not
# read but waited for; a completion is useful within about half a second. Thinking: assumed, what
# makers' demonstrations and users' logs show runs from 100 tokens to many thousands. The longest
# waits: where people are seen to give up, an agent's client to time out. Of a conversation the
# cache holds all but the last question, of a text that is written all but what is behind the cursor:
# assumed 256 tokens, which are read anew each turn.
_CHAT = Need(16384, 2048, 1792, 5.0, 20.0, 4.0, "chat", 60.0, 600, 15.0)
_CODING = Need(65536, 16384, 14336, 10.0, 40.0, 8.0, "a coding agent", 300.0, 400, 12.0, 131072)
_AUTOCOMPLETE = Need(8192, 2048, 1792, 30.0, 100.0, 0.5, "autocomplete", 10.0, 0, 1.0)
_LONG = Need(131072, 65536, 0, 4.0, 15.0, 60.0, "long documents", 1200.0, 800, 30.0)
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
    """The purpose's need with what the person stated laid over it."""
    need = NEEDS[workload.purpose]
    if workload.min_decode_tok_s > 0:
        need = replace(
            need,
            least_tok_s=workload.min_decode_tok_s,
            good_tok_s=max(need.good_tok_s, workload.min_decode_tok_s),
        )
    if workload.prompt_tokens != Workload().prompt_tokens:
        need = replace(need, prompt_tokens=workload.prompt_tokens, cached_tokens=0)
    return need


def unsuited(model: Model, workload: Workload) -> str | None:
    """Why `model` is not made for this purpose, or None."""
    purpose = workload.purpose
    if purpose in ("chat", "reasoning"):
        return None if "chat" in model.purposes else "is not a chat model"
    if purpose == "long":
        return _unsuited_for_long(model, workload)
    if purpose in model.purposes:
        return None
    if purpose == "embedding":
        return "is not made for embedding"
    if purpose == "autocomplete" and not model.fim:
        return "has no fill-in-the-middle training"
    if purpose == "coding" and not model.calls_tools:
        return "is not trained to call tools"
    return None


def _unsuited_for_long(model: Model, workload: Workload) -> str | None:
    wanted = min(_LONG.prompt_tokens, workload.context or _LONG.context)
    if 0 < model.native_context < wanted:
        length = f"{model.native_context // 1024}k tokens"
        return f"its context of {length} is too short for long documents"
    if "chat" not in model.purposes:
        return "is not a chat model"
    return None


# Points that every doubling of the wait for a prompt beyond what feels good costs, and of the wait
# for thoughts: those are tokens like the answer's, and too few a second cost the same
# (`plan.score`).
_PROMPT_DOUBLED = 3.0
_THOUGHTS_DOUBLED = 5.0
# Thoughts of more than this times what feels good are waited for by nobody who has a choice: a
# doubling costs twice as much.
_LONG_THOUGHTS = 2.0


def thinking_tokens(model: Model, need: Need) -> int:
    """Tokens `model` is assumed to think before it answers; 0 for one that does not.

    A hybrid counts as thinking: its scores are those it has when it thinks.
    """
    if model.reasoning_kind == "none":
        return 0
    return need.thinking_tokens


def answer_s(plan: Plan, need: Need) -> float:
    """Seconds until the answer itself begins: the part of the prompt that is not cached, then the
    thoughts."""
    return plan.later_ttft_s + thinking_tokens(plan.model, need) / plan.stream_tok_s


def prompt_lost(plan: Plan, need: Need) -> float:
    """What waiting for the prompt costs on the quality index, against what feels good."""
    return _PROMPT_DOUBLED * math.log2(max(1.0, plan.later_ttft_s / need.ttft_good_s))


def points_lost(plan: Plan, need: Need) -> float:
    """What waiting costs on the quality index: for the prompt and for the thoughts, each against
    what feels good."""
    share = thinking_tokens(plan.model, need) / plan.stream_tok_s / need.thinking_good_s
    doubled = math.log2(max(1.0, share)) + math.log2(max(1.0, share / _LONG_THOUGHTS))
    return prompt_lost(plan, need) + _THOUGHTS_DOUBLED * doubled


# Points that being tight, and lying in two memories, take off a plan's rank.
_TIGHT_COST = 2.0
SPLIT_COST = 1.0
# Every card beside the first, since another model could have it; and what is tight on some of
# several.
_CARD_COST = 0.25
# Points taken off per point of uncertainty beyond a measured model's: an unrated newcomer does not
# outrank known ones.
_DOUBT = 1.25
_KNOWN_SPREAD = 1.5
# Points that a halving of speed below what feels good takes, that a doubling beyond it brings, and
# the most it brings.
_SLOW = 5.0
_SPARE = 0.25
_MOST_SPARE = 1.0
# Share of its points that a file loses whose name and size are constructed: a listed one this near
# goes before it.
_ESTIMATE_COST = 0.03


def score(plan: Plan, need: Need) -> float:
    """Points: quality, less 5 for every halving of speed below what feels good, plus a quarter of a
    point for every doubling beyond it, 1 at most: who reads gains little, and the wait for thoughts
    is counted by itself.

    Speed is that of the purpose's answers, with what the plan's own drafting brings to them. The
    wait for the answer, thoughts included, is counted by `points_lost`; a plan that fits only
    tightly loses 2 (unless a card is to spare), one split over two memories 1 more than its speed
    says, and every card but the first a quarter. Files that nobody has listed lose 3 % of what is
    left.
    """
    points = plan.quality
    points -= _DOUBT * max(0.0, plan.quality_spread - _KNOWN_SPREAD)
    rate = plan.decode_tok_s.value
    if plan.drafting is not None:
        rate *= plan.drafting.value
    doublings = math.log2(rate / need.good_tok_s)
    if doublings < 0:
        points += _SLOW * doublings
    else:
        points += min(_MOST_SPARE, _SPARE * doublings)
    points -= points_lost(plan, need)
    if plan.fits == "tight":
        points -= _CARD_COST if plan.settings.placement.cards else _TIGHT_COST
    if plan.fits == "split":
        points -= SPLIT_COST
    points -= _CARD_COST * max(0, len(plan.memory.cards_bytes) - 1)
    if plan.variant.is_estimate:
        points -= _ESTIMATE_COST * abs(points)
    return round(points, 4)


def context_can_grow(plan: Plan, need: Need) -> bool:
    """True where the plan's context can grow to what the purpose comes to in a long session."""
    most = min(need.grown_context, plan.model.native_context or need.grown_context)
    more_bytes = max(0, most - plan.settings.n_ctx) * plan.kv_bytes_per_1k / 1024
    held = plan.memory
    growth = 1 + more_bytes / held.total_bytes
    taken_bytes = held.cards_bytes or (held.total_bytes,)
    limits_bytes = held.cards_limit_bytes or (held.limit_bytes,)
    return all(n * growth <= most for n, most in zip(taken_bytes, limits_bytes, strict=False))


def too_long(plan: Plan, need: Need) -> bool:
    """True where the first token of a whole prompt comes later than the purpose can live with."""
    return plan.ttft_s.value > need.ttft_longest_s


def sentence(plan: Plan, need: Need) -> str | None:
    """ "thinks first, about 600 tokens (assumed): its answer begins after 13 s"; None for one that
    does not think."""
    tokens = thinking_tokens(plan.model, need)
    if not tokens:
        return None
    return (
        f"thinks first, about {tokens:,} tokens (assumed): its answer begins after "
        f"{span(answer_s(plan, need))}"
    )
