"""Finds a model that makes the same call again and again: same tool, same arguments, same result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# So many equal calls in a row are worth a notice.
MIN_NOTED = 3
# A call: the tool, its arguments as JSON, its result.
_Call: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """The tool `name` was called `times` in a row with equal arguments and results."""

    name: str
    times: int

    def __str__(self) -> str:
        return f"{self.name} {self.times} times"


def repeated_call(messages: Sequence[Mapping[str, Any]]) -> RepeatedCall | None:
    """The call that the newest rounds of normalised `messages` repeat most often, or None.

    A round is an assistant message with calls and their results. Equal calls within one round count
    once. A conversation that ends in anything but a result has no repeated call.
    """
    if not messages or messages[-1]["role"] != "tool":
        return None
    repeated: set[_Call] | None = None
    times = 0
    results: dict[str, str] = {}
    for message in reversed(messages):
        if message["role"] == "tool":
            results.setdefault(message.get("tool_call_id", ""), message["content"])
        if not message.get("tool_calls"):
            continue
        calls = {_call(call, results) for call in message["tool_calls"]}
        results = {}
        in_both = calls if repeated is None else calls & repeated
        if not in_both:
            break
        repeated = in_both
        times += 1
    if times < MIN_NOTED or not repeated:
        return None
    return RepeatedCall(min(repeated)[0], times)


def _call(call: Mapping[str, Any], results: Mapping[str, str]) -> _Call:
    function = call["function"]
    arguments = json.dumps(function["arguments"], sort_keys=True)
    return function["name"], arguments, results.get(call["id"], "")
