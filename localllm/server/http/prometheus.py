"""Prometheus' text format: metrics with their series."""

from __future__ import annotations

from collections.abc import Iterable

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metric(name: str, kind: str, series: Iterable[tuple[str, object]]) -> list[str]:
    """Return the lines of a metric. Each entry of `series` has its labels (as `labels` returns
    them, or "") and its value."""
    lines = [f"# TYPE {name} {kind}"]
    for named, value in series:
        lines.append(f"{name}{{{named}}} {value}" if named else f"{name} {value}")
    return lines


def labels(**values: str) -> str:
    """Return the labels of a series, with their values escaped."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items())
