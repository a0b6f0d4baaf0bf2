"""`localllm bench --compare FILE`: this run beside an earlier one, as `bench --json` printed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from localllm import json_store
from localllm.errors import UsageError

# What names a row of a list, in the order of the columns.
_ROW_NAMES = ("depth", "streams", "kv_type", "tokens", "workload")
# What is no result of a run: predictions, and what a run was asked for.
_NOT_RESULTS = ("predicted", "prompt_tokens", "rounds", "n_ctx", "n_batch", "share", "disk.")


def read(file: Path) -> dict[str, Any]:
    """The figures in `file`. Raises UsageError for what is none."""
    try:
        body = json_store.load(file)
    except (OSError, ValueError) as e:
        raise UsageError(f"{file} can't be read as figures of bench: {e}") from e
    if not isinstance(body, dict) or not isinstance(body.get("decode_tok_s"), (int, float)):
        raise UsageError(
            f"{file} holds no figures of bench", hint=f"localllm bench MODEL --json > {file}"
        )
    return body


def compared(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Every figure that both runs have: what it was, what it is, and the second over the first."""
    before, after = dict(_flat(then)), dict(_flat(now))
    return {
        name: {"then": before[name], "now": value, "ratio": value / before[name]}
        for name, value in after.items()
        if before.get(name) and not any(part in name for part in _NOT_RESULTS)
    }


def table(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    head = f"{'':44}{'then':>11}{'now':>11}{'now ÷ then':>12}"
    return [
        head,
        *(
            f"{n[:44]:44}{r['then']:>11.4g}{r['now']:>11.4g}{r['ratio']:>11.2f}×"
            for n, r in rows.items()
        ),
    ]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        own = next(
            (
                f"{k} {value[k]}"
                for k in _ROW_NAMES
                if name and isinstance(value.get(k), (int, str))
            ),
            "",
        )
        for key, inner in value.items():
            if not (own and own.startswith(f"{key} ")):
                yield from _flat(inner, " ".join(part for part in (name, own, str(key)) if part))
    elif isinstance(value, list):
        for inner in value:
            yield from _flat(inner, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)
