"""Mermaid's flowcharts and sequence diagrams in box characters, if they fit."""

from __future__ import annotations

from functools import lru_cache

from localllm_tui.widgets.flowchart_layout import flowchart_rows
from localllm_tui.widgets.sequence_diagram import sequence_rows

# Longer diagrams are shown as their source.
_LONGEST = 4_000


@lru_cache(maxsize=64)
def diagram_rows(code: str, width: int) -> tuple[str, ...]:
    """The rows of a diagram; () if it needs more cells than `width`, or can't be read."""
    if len(code) > _LONGEST:
        return ()
    lines = [line.strip() for line in code.splitlines()]
    lines = [line for line in lines if line and not line.startswith("%%")]
    if not lines:
        return ()
    if lines[0] == "sequenceDiagram":
        return tuple(sequence_rows(lines, width))
    return tuple(flowchart_rows(lines, width))
