"""The sampling settings in plain words, and their changes during a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.errors import UsageError

# The parameters of /sampling with their minimum and maximum.
_KNOWN: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 100_000),
    "min_p": (0, 1),
    "repeat_penalty": (0.01, 10),
    "seed": (0, 2**63 - 1),
    "max_tokens": (1, 2**31 - 1),
}
_INTEGERS = ("top_k", "seed", "max_tokens")
_HEAT = (
    (0.0, "always the most likely token"),
    (0.35, "steady"),
    (0.75, "balanced"),
    (1.1, "varied"),
)


def words(own: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """Describe the sampling settings: those `chosen` in this chat override the model's `own`.

    Returns "" if there are no settings.
    """
    now = {**own, **chosen}
    parts = []
    heat = now.get("temperature")
    if isinstance(heat, (int, float)):
        how = next((words for max_heat, words in _HEAT if heat <= max_heat), "wild")
        parts.append(f"{how} (temperature {heat:g})")
    parts += [
        f"{name} {chosen[name]:g}"
        for name in ("top_p", "top_k", "min_p", "repeat_penalty")
        if name in chosen
    ]
    if "seed" in chosen:
        parts.append(f"repeatable (seed {chosen['seed']})")
    if "max_tokens" in chosen:
        parts.append(f"at most {chosen['max_tokens']:,} tokens")
    return ", ".join(parts)


def changed(chosen: Mapping[str, Any], text: str) -> dict[str, Any]:
    """`chosen` changed by `text`: "temperature 0.2", "seed 7"; "-" resets all. Raises
    UsageError."""
    others = {name: value for name, value in chosen.items() if name not in _KNOWN}
    if text == "-":
        return others
    name, _, value = text.replace("=", " ").partition(" ")
    if name not in _KNOWN:
        raise UsageError(
            f"/sampling {name} is unknown", hint=f"one of: {', '.join(_KNOWN)}; - resets all"
        )
    minimum, maximum = _KNOWN[name]
    try:
        number = int(value) if name in _INTEGERS else float(value)
        if not minimum <= number <= maximum:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{name} must be a number from {minimum:g} to {maximum:g}, not {value.strip()!r}"
        ) from None
    return {**chosen, name: number}
