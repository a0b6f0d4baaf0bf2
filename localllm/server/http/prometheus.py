"""Prometheus' text format: metrics with their series."""

from __future__ import annotations

from collections.abc import Iterable

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metric(name: str, kind: str, series: Iterable[tuple[str, object]]) -> list[str]:
    """The lines of a metric; each of its `series` is its labels (of `labels`, or none) and its
    value."""
    lines = [f"# TYPE {name} {kind}"]
    for named, value in series:
        lines.append(f"{name}{{{named}}} {value}" if named else f"{name} {value}")
    return lines


def labels(**values: str) -> str:
    """Labels of a series, with their values escaped."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items())
