"""Xcode."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from localllm.cli.editors.recipe import Recipe, Target


def xcode(t: Target, home: Path) -> Recipe:
    """Xcode: settings inside the IDE."""
    where = (
        f"`Locally Hosted`, port {urlsplit(t.url).port}" if "127.0.0.1" in t.url else f"`Internet Hosted`, URL {t.url}"
    )
    return Recipe(
        "Xcode",
        steps=(
            f"Settings > Intelligence > Add a Model Provider: {where} (the server's address is {t.url}).",
            f"Then choose {t.model} in the coding assistant.",
        ),
        probes=("models", "chat", "tools"),
    )
