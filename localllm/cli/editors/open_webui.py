"""Open WebUI."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import Recipe, Target


def open_webui(t: Target, home: Path) -> Recipe:
    """Open WebUI: environment variables, or its connection settings."""
    return Recipe(
        "Open WebUI",
        steps=("Or: Admin Settings > Connections > OpenAI API, with the same URL and key.",),
        probes=("models", "chat"),
        environment={"OPENAI_API_BASE_URL": f"{t.url}/v1", "OPENAI_API_KEY": t.key},
    )
