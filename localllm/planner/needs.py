"""What each purpose asks of a machine: context, prompt, the speed that is needed and the speed that feels good."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from localllm.planner.types import Plan, Workload
from localllm_catalog.types import Model, Purpose


@dataclass(frozen=True, slots=True)
class Need:
    """Tokens and tokens/s. Below `least_tok_s` a plan is not offered; up to `good_tok_s` more speed is worth points.

    `ttft_good_s` likewise for the wait before an answer to `prompt_tokens`, of which `cached_tokens` were seen before;
    with nothing cached, nobody waits longer than `ttft_longest_s` for it. A model that thinks is assumed to think
    `thinking_tokens` first, which feels good within `thinking_good_s`.
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


# People read 4-6 words a second: 6-8 tokens/s keeps up, 20 feels fluent; an agent's output is not read but waited for;
# a completion is useful within about half a second. Thinking: assumed, what makers' demonstrations and users' logs show
# runs from 100 tokens to many thousands. The longest waits: where people are seen to give up, an agent's client to time out.
NEEDS: dict[Purpose, Need] = {
    "chat": Need(16384, 2048, 0, 5.0, 20.0, 4.0, "chat", 60.0, 600, 15.0),
    "coding": Need(65536, 16384, 14336, 10.0, 40.0, 8.0, "a coding agent", 300.0, 400, 12.0),
    "autocomplete": Need(8192, 2048, 1024, 30.0, 100.0, 0.5, "autocomplete", 10.0, 0, 1.0),
    "long": Need(131072, 65536, 0, 4.0, 15.0, 60.0, "long documents", 1200.0, 800, 30.0),
    "reasoning": Need(32768, 2048, 0, 10.0, 40.0, 6.0, "reasoning", 120.0, 2000, 60.0),
    "embedding": Need(8192, 2048, 0, 1.0, 1.0, 2.0, "embeddings", 60.0, 0, 2.0),
}


def need_of(workload: Workload) -> Need:
    """The purpose's need with what the person stated laid over it."""
    need = NEEDS[workload.purpose]
    if workload.min_decode_tok_s > 0:
        need = replace(
            need, least_tok_s=workload.min_decode_tok_s, good_tok_s=max(need.good_tok_s, workload.min_decode_tok_s)
        )
    if workload.prompt_tokens != Workload().prompt_tokens:
        need = replace(need, prompt_tokens=workload.prompt_tokens, cached_tokens=0)
    return need


def unsuited(model: Model, workload: Workload) -> str | None:
    """Why `model` is not made for this purpose, or None."""
    purpose = workload.purpose
    if purpose == "autocomplete":
        return None if model.fim or "autocomplete" in model.purposes else "has no fill-in-the-middle training"
    if purpose == "coding":
        coder = "coding" in model.purposes or model.calls_tools
        return None if coder else "is not trained to call tools"
    wanted = min(NEEDS[purpose].prompt_tokens, workload.context or NEEDS[purpose].context)
    if purpose == "long" and 0 < model.native_context < wanted:
        return f"its context of {model.native_context // 1024}k tokens is too short for long documents"
    if purpose in ("chat", "reasoning", "long"):
        return None if "chat" in model.purposes else "is not a chat model"
    return None if purpose in model.purposes else f"is not made for {purpose}"


# Points that every doubling of the wait for a prompt beyond what feels good costs, and of the wait for thoughts: those are
# tokens like the answer's, and too few a second cost the same (`plan.score`).
_PROMPT_DOUBLED, _THOUGHTS_DOUBLED = 3.0, 5.0


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
    lost = _PROMPT_DOUBLED * math.log2(max(1.0, prompt_s / need.ttft_good_s))
    return lost + _THOUGHTS_DOUBLED * math.log2(max(1.0, thoughts_s / need.thinking_good_s))


def thinks_long(plan: Plan, need: Need) -> bool:
    """True where the thoughts before an answer take more than twice what feels good."""
    return thinking_tokens(plan.model, need) / plan.decode_tok_s.value > 2 * need.thinking_good_s


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
