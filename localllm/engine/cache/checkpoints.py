"""Checkpoints: where the state of a model that can't rewind is kept, so that later prompts may go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.engine.cache import tunables


@dataclass(frozen=True, slots=True)
class Signs:
    """What tokens say of a prompt's parts: control tokens stand around turns, others end a paragraph."""

    is_control: Callable[[int], bool]
    ends_paragraph: Callable[[int], bool]


def checkpoints(prompt: Sequence[int], n_kv: int, known: int, signs: Signs, interval: int | None) -> list[int]:
    """Points of `prompt`, whose first `n_kv` tokens are held, at which its state is to be kept:

    * before its last two turns: an answer is asked for again from there, or rendered in another way next time. Not before the
      answer's where the question is short: a step and a state for each turn would cost more than reading it again
    * near its end, where no turn begins there

    And where states are kept apart from KV, every `interval` tokens (None: they aren't):

    * where it leaves what was known (its first `known` tokens): what branches twice branches again
    * one in every `interval` tokens, where a turn begins if one does
    * where the last paragraph begins: instructions or a document stand before it, and the next question goes on from there
      (Gemma's template has both in one turn)
    * of a long end with neither in it a few points, ever nearer to it"""
    n = len(prompt)
    control = [i for i in range(n) if signs.is_control(prompt[i])]
    turns = [i for i in control if prompt[i] == prompt[control[-1]]]
    points = set(turns[-2:])
    if interval is not None:
        points.add(known)
        points |= _paragraph(prompt, max(n_kv, known), signs) or _towards_the_end(points, turns, n)
        points |= _spaced(turns, n, interval)
    last = max((p for p in points if tunables.NEAR_TOKENS <= p < n), default=0)
    if n - last > (tunables.WORTH_A_STEP_TOKENS if last else tunables.NEAR_TOKENS):
        points.add(n - tunables.TAIL_TOKENS)
    required = {*turns[-2:-1], n - tunables.TAIL_TOKENS}
    if known == n - 1 and interval is not None:
        # The same prompt again: it will be sent once more.
        required.add(known)
    kept: list[int] = []
    for point in sorted(p for p in points if max(n_kv, tunables.NEAR_TOKENS - 1) < p < n):
        before = kept[-1] if kept else n_kv
        if point in required or point - before >= tunables.NEAR_TOKENS:
            kept.append(point)
    return kept


def _paragraph(prompt: Sequence[int], start: int, signs: Signs) -> set[int]:
    """Where the last one begins, if it is far enough behind `start`; nothing nearer is looked at."""
    worth = range(len(prompt) - 1, start + tunables.WORTH_A_PARAGRAPH_TOKENS - 1, -1)
    return set(next(([i] for i in worth if signs.ends_paragraph(prompt[i - 1])), []))


def _towards_the_end(points: set[int], turns: Sequence[int], n: int) -> set[int]:
    """Some before where the prompt ends, or the turn before the answer's, which has just begun; unless one of `points` is
    near them."""
    end = turns[-1] if turns and n - turns[-1] < tunables.NEAR_TOKENS else n
    found = {end - far for far in tunables.POINTS_FROM_THE_END}
    return {
        p
        for p in found
        if not any(p - tunables.POINTS_FROM_THE_END[0] <= q < p + tunables.NEAR_TOKENS for q in {0, *points})
    }


def _spaced(turns: Sequence[int], n: int, interval: int) -> set[int]:
    found = set()
    for start in range(interval, n, interval):
        within = [t for t in turns if start - interval < t <= start]
        found.add(within[-1] if within else start)
    return found
