"""Compare greedy answers, except for near ties that rounding may reverse."""

from __future__ import annotations

import httpx


def same(answer: httpx.Response, other: httpx.Response, tie: float) -> bool:
    """Return True if two answers with `logprobs` are equal up to a tie: a difference below `tie`
    between the log-probabilities of two tokens.

    Steps of another shape round KV differently, so the better one of two nearly equal tokens may
    change. After such a token the answers continue different texts.
    """
    ours, theirs = (each.json()["choices"][0] for each in (answer, other))
    if ours["text"] == theirs["text"]:
        return True
    tops = (each["logprobs"]["top_logprobs"] for each in (ours, theirs))
    for our_top, their_top in zip(*tops, strict=True):
        our_token = max(our_top, key=our_top.__getitem__)
        if our_token != max(their_top, key=their_top.__getitem__):
            return our_token in their_top and max(their_top.values()) - their_top[our_token] < tie
    return False
