"""`localllm bench --compare FILE`: compare this run with an earlier one, as `bench --json` printed
it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm import json_store
from localllm.errors import UsageError

# The measured figures and their labels.
_LABELS = {
    "decode_tok_s": "decode, tok/s",
    "short_tok_s": "decode after a short prompt, tok/s",
    "prefill_tok_s": "prefill, tok/s",
    "memory_bytes": "memory, bytes",
}


def read(file: Path) -> dict[str, float]:
    """Return the measured figures in `file`. Raises UsageError if it has none."""
    hint = f"write it with: localllm bench MODEL --json > {file}"
    try:
        body = json_store.load(file)
    except OSError as e:
        raise UsageError(f"{file} can't be read: {e.strerror or e}", hint=hint) from e
    except ValueError as e:
        raise UsageError(f"{file} is not what bench --json prints: {e}", hint=hint) from e
    figures = {}
    if isinstance(body, dict):
        figures = {name: body[name] for name in _LABELS if _is_figure(body.get(name))}
    if not figures:
        raise UsageError(f"{file} has no figures of bench", hint=hint)
    return figures


def _is_figure(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def compared(earlier: Mapping[str, float], now: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return each figure of both runs: "then" (earlier), "now", and "ratio" (now ÷ then)."""
    return {
        name: {"then": value, "now": now[name], "ratio": now[name] / value}
        for name, value in earlier.items()
        if name in now
    }


def lines(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Format what `compared` returns."""
    text_lines = [f"{'compared with the earlier run':36}{'then':>14}{'now':>14}{'now ÷ then':>12}"]
    for name, row in figures.items():
        text_lines.append(
            f"{_LABELS[name]:36}{row['then']:>14,.1f}{row['now']:>14,.1f}{row['ratio']:>11.2f}×"
        )
    return text_lines
