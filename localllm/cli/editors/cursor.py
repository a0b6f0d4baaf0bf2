"""Cursor."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import Recipe, Target


def cursor(t: Target, home: Path) -> Recipe:
    """Cursor can't reach this machine."""
    return Recipe(
        "Cursor",
        steps=(
            "Cursor sends its requests from its own cloud, so an address on this machine can't be reached from there.",
            "Use another editor for local models. A public tunnel would open this machine's model to the internet.",
        ),
        probes=(),
    )
