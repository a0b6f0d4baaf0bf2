"""Qwen Code."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def qwen(t: Target, home: Path) -> Recipe:
    """Qwen Code: a model provider in its settings."""
    entry = {
        "id": t.model,
        "name": f"{t.model} (this machine)",
        "baseUrl": f"{t.url}/v1",
        "envKey": "LOCALLLM_API_KEY",
        "generationConfig": {
            "contextWindowSize": t.n_ctx,
            "samplingParams": {"max_tokens": t.answer_tokens},
        },
    }
    settings = {
        "modelProviders": {"openai": [entry]},
        "env": {"LOCALLLM_API_KEY": t.key},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": t.model},
    }
    return Recipe(
        "Qwen Code",
        (ConfigFile(home / ".qwen/settings.json", settings),),
        probes=("chat", "tools"),
        checked="0.15.10",
    )
