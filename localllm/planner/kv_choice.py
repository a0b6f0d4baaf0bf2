"""Which KV types a plan may use, in order: f16 first, a quantised pair only where it is known, or likely, to do no harm.

The lines between: an 8-bit cache is not known to have hurt anybody, and on the smallest model measured (SmolLM2-135M, over
the engine's text of an agent) costs 0.004 nats and 4 % of best tokens; with 4 bits (there 0.06 nats, 13 %) published
reports have tool arguments broken in 3 to 10 of 14 tasks. So an agent's model gets 4 bits only where they were measured on
it to be about as good as 8; a chat does without evidence, but not against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm_catalog.types import Purpose

# Mean KL(f16 || type) in nats and share of changed best tokens that are still harmless, for those who write calls and code,
# and for those who talk.
_EXACT = (0.01, 0.05)
_TALK = (0.05, 0.1)
_EXACTING: tuple[Purpose, ...] = ("coding", "autocomplete")
# By the bytes they take, f16 first. Mixed pairs have their kernel in every CPU build; CUDA's are an option of the build.
_LADDER = ("f16", "q8_0", "q8_0/q4_0", "q4_0")


@dataclass(frozen=True, slots=True)
class KvPrecision:
    """What was measured of a KV type (or "K/V" pair) on this very model: see `localllm_backends.contract.KvFidelity`."""

    kv_type: str
    mean_kl: float
    flips: float


def ladder(purpose: Purpose, evidence: Sequence[KvPrecision], *, mixed: bool) -> tuple[str, ...]:
    """KV types to try in order for `purpose`. `mixed`: pairs of two types have a fast kernel here."""
    return tuple(k for k in _LADDER if (mixed or "/" not in k) and _will_do(k, purpose, evidence))


def _will_do(kv_type: str, purpose: Purpose, evidence: Sequence[KvPrecision]) -> bool:
    if kv_type == "f16":
        return True
    known = next((e for e in evidence if e.kv_type == kv_type), None)
    if known is None:
        return "q4" not in kv_type or (purpose not in _EXACTING and "/" not in kv_type)
    return passes(known, purpose)


def passes(evidence: KvPrecision, purpose: Purpose) -> bool:
    """True where what was measured is harmless for `purpose`."""
    most_kl, most_flips = _EXACT if purpose in _EXACTING else _TALK
    return evidence.mean_kl <= most_kl and evidence.flips <= most_flips


def why(kv_type: str, purpose: Purpose, evidence: Sequence[KvPrecision]) -> str:
    """What the choice of `kv_type` rests on, in a few words."""
    if kv_type in ("f16", "bf16", "f32"):
        return "exact"
    known = next((e for e in evidence if e.kv_type == kv_type), None)
    if known is None:
        return "not measured on this model yet"
    verdict = "harmless" if passes(known, purpose) else "harmful"
    return f"{known.mean_kl:.4f} nats and {known.flips:.1%} of best tokens from f16 here: {verdict} for {purpose}"
