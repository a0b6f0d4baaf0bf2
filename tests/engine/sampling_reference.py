"""Reference implementation of sampling: llama.cpp's sampler chain, one sampler after the other in
double precision, over complete rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from localllm.engine.messages import Sampling
from localllm.engine.sampling.rejection import Distribution

Row = NDArray[np.float32]
Probs = NDArray[np.float64]


def acceptance_probability(p: Distribution, q: Distribution) -> float:
    """Return 1 − TV(p, q): the probability that a token drawn from `q` is accepted."""
    return sum(min(p.prob(token), q.prob(token)) for token in p.ids.tolist())


def after_penalties(
    row: Row,
    s: Sampling,
    history: Seq[int] = (),
    *,
    spell: Callable[[int], bytes] | None = None,
    allowed: NDArray[np.bool_] | None = None,
    banned: Seq[int] = (),
) -> Probs:
    """Return the logits after logit bias, penalties, DRY, grammar and bans."""
    out = row.astype(np.float64)
    for token, bias in s.logit_bias.items():
        if 0 <= token < len(row):
            out[token] = out[token] + bias if bias > -100 else -np.inf
    last = history if s.repeat_last_n < 0 else history[max(0, len(history) - s.repeat_last_n) :]
    for token, count in Counter(t for t in last if t >= 0).items():
        value = out[token] / s.repeat_penalty if out[token] > 0 else out[token] * s.repeat_penalty
        out[token] = value - s.presence_penalty - count * s.frequency_penalty
    if s.dry_multiplier and spell is not None:
        for token, length in dry_repetitions(history, s, spell).items():
            out[token] -= min(
                s.dry_multiplier * s.dry_base ** min(length - s.dry_allowed_length, 158), 3e38
            )
    if allowed is not None:
        out[~allowed] = -np.inf
    open_ = out.copy()
    open_[list(banned)] = -np.inf
    return open_ if (open_ > -np.inf).any() or np.isnan(open_).any() else out


def dry_repetitions(
    history: Seq[int], s: Sampling, spell: Callable[[int], bytes]
) -> dict[int, int]:
    """DRY: return for every token of the window the length of the longest suffix of the window that
    also occurs right before that token."""
    n = len(history) if s.dry_penalty_last_n < 0 else s.dry_penalty_last_n
    window = list(history[max(0, len(history) - n) :])
    reach = _behind_the_last_breaker(window, [b.encode() for b in s.dry_sequence_breakers], spell)
    out: dict[int, int] = {}
    if len(window) <= s.dry_allowed_length or reach < s.dry_allowed_length:
        return out
    for at in range(1, len(window)):
        same = 0
        while same < min(at, reach) and window[at - 1 - same] == window[-1 - same]:
            same += 1
        if same >= s.dry_allowed_length:
            out[window[at]] = max(out.get(window[at], 0), same)
    return {
        t: n
        for t, n in out.items()
        if not any(b.encode() in spell(t) for b in s.dry_sequence_breakers)
    }


def _behind_the_last_breaker(
    window: Seq[int], breakers: Seq[bytes], spell: Callable[[int], bytes]
) -> int:
    """Return the number of complete tokens after the last breaker. Of the breakers that start in
    the latest token, the one that ends last counts."""
    found = []
    for first in range(len(window)):
        text = b"".join(spell(t) for t in window[first:])
        for b in breakers:
            at = max(
                (i for i in range(len(spell(window[first]))) if text[i:].startswith(b)), default=-1
            )
            if at >= 0:
                last = first
                while len(b"".join(spell(t) for t in window[first : last + 1])) < at + len(b):
                    last += 1
                found.append((first, last))
    return len(window) - 1 - max(found)[1] if found else len(window)


def _shares(values: Probs) -> Probs:
    exp = np.exp(values - values.max())
    return np.asarray(exp / exp.sum())


def readable(logits: Row | Probs) -> Probs:
    """Replace NaN by −inf. If a logit is +inf, make all +inf logits equal and all others −inf."""
    row = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    return np.where(row == np.inf, 0.0, -np.inf) if np.inf in row else row


def kept(row: Probs, s: Sampling) -> NDArray[np.int64]:
    """Return the ids that remain after top_k, typical_p, top_p and min_p, in this order, sorted by
    logit, then by id."""
    ids = np.lexsort((np.arange(len(row)), -row))
    ids = ids[row[ids] > -np.inf]
    if not len(ids):
        return np.zeros(1, dtype=np.int64)
    if 0 < s.top_k < len(row):
        ids = ids[: s.top_k]
    if s.typical_p < 1:
        p = _shares(row[ids])
        surprise = -np.log(np.maximum(p, 1e-300))
        order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        ids = ids[np.sort(order[: int(np.searchsorted(np.cumsum(p[order]), s.typical_p)) + 1])]
    if s.top_p < 1:
        ids = ids[: int(np.searchsorted(np.cumsum(_shares(row[ids])), s.top_p)) + 1]
    return ids[_shares(row[ids]) >= s.min_p * _shares(row[ids])[0]]


def tempered(row: Probs, ids: NDArray[np.int64], s: Sampling) -> Probs:
    """Return the probabilities of the ranked `ids` after XTC and the temperature (> 0)."""
    out = np.zeros(len(row))
    if not (row[ids] > -np.inf).all():
        out[ids] = 1.0
        return out
    top = ids[_shares(row[ids]) >= s.xtc_threshold]
    chance = min(1.0, s.xtc_probability) if s.xtc_threshold <= 0.5 and len(top) > 1 else 0.0
    for left, share in ((ids, 1.0 - chance), (ids[max(0, len(top) - 1) :], chance)):
        if share:
            out[left] += share * _shares(row[left] / s.temperature)
    return out


def probabilities(logits: Row, s: Sampling) -> Probs:
    """Return each token's probability after top_k, typical_p, top_p, min_p, XTC and temperature (>
    0), in this order."""
    row = readable(logits)
    return tempered(row, kept(row, s), s)


def rows_like_models(n: int, seed: int, kind: str) -> Row:
    """Return random logits of the given kind: like those of models, or degenerate."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0.0, 2.2, n).astype(np.float32)
    some = rng.integers(0, n, 40)
    if kind not in ("flat", "deep", "forbidden flat", "bf16"):
        row[some] += np.linspace(18, 6, 40).astype(np.float32)
    if kind in ("ties", "bf16"):
        row = np.round(row * (1 if kind == "ties" else 64)) / np.float32(
            1 if kind == "ties" else 64
        )
    elif kind == "equal":
        row[:] = 3.0
    elif kind == "spike":
        row[some[0]] = 90.0
    elif kind == "forbidden":
        row[rng.random(n) < 0.999] = -np.inf
        row[some[0]] = 1.0
    elif kind == "forbidden flat":
        row[rng.random(n) < 0.4] = -np.inf
        row[some[0]] = 1.0
    elif kind == "deep":
        row[rng.random(n) < 0.4] -= np.float32(500.0)
    elif kind == "large":
        row = row * 9.0 - 300.0
    elif kind == "nan":
        row[some[:3]] = np.nan
    elif kind == "infinite":
        row[some[:2]] = np.inf
    elif kind == "nothing":
        row[:] = -np.inf
    return row.astype(np.float32)


KINDS = (
    *(
        "words",
        "words",
        "flat",
        "flat",
        "ties",
        "bf16",
        "equal",
        "spike",
        "forbidden",
        "forbidden flat",
        "deep",
    ),
    *("large", "nan", "infinite", "nothing"),
)


def interval_faults(drawn: Seq[tuple[float, int]], probs: Probs, tolerance: float) -> list[str]:
    """Return the violations in draws given as (uniform, token): each token must own one interval of
    uniforms, as long as the token's probability."""
    faults = []
    by_uniform = sorted(drawn)
    at = 0
    while at < len(by_uniform):
        token, end = by_uniform[at][1], at
        while end + 1 < len(by_uniform) and by_uniform[end + 1][1] == token:
            end += 1
        inner = by_uniform[end][0] - by_uniform[at][0]
        before = by_uniform[at - 1][0] if at else 0.0
        behind = by_uniform[end + 1][0] if end + 1 < len(by_uniform) else 1.0
        if not inner - tolerance <= probs[token] <= behind - before + tolerance or (
            probs[token] <= 0 and math.isfinite(inner)
        ):
            faults.append(
                f"token {token} of probability {probs[token]} is drawn from {by_uniform[at][0]} "
                f"on, {inner} long"
            )
        at = end + 1
    runs = sum(1 for i, (_, t) in enumerate(by_uniform) if not i or by_uniform[i - 1][1] != t)
    if runs != len({t for _, t in drawn}):
        faults.append("some token has two intervals")
    return faults
