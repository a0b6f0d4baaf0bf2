"""Crush."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def crush(t: Target, home: Path) -> Recipe:
    """Crush: an OpenAI-compatible provider."""
    model = {
        "id": t.model,
        "name": f"{t.model} (this machine)",
        "context_window": t.n_ctx,
        "default_max_tokens": t.answer_tokens,
    }
    provider = {
        "name": "localllm",
        "type": "openai-compat",
        "base_url": f"{t.url}/v1",
        "api_key": t.key,
        "models": [model],
    }
    merge = {"$schema": "https://charm.land/crush.json", "providers": {"localllm": provider}}
    file = ConfigFile(home / ".config/crush/crush.json", merge)
    return Recipe("Crush", (file,), ("Choose the model with ctrl+l.",), ("chat", "tools"))
