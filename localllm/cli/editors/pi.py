"""pi."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def pi(t: Target, home: Path) -> Recipe:
    """pi: a provider in its list of models."""
    model = {
        "id": t.model,
        "name": f"{t.model} (this machine)",
        "reasoning": True,
        "input": ["text"],
        "contextWindow": t.n_ctx,
        "maxTokens": t.answer_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": f"{t.url}/v1",
        "api": "openai-completions",
        "apiKey": t.key,
        "models": [model],
    }
    return Recipe(
        "pi",
        (ConfigFile(home / ".pi/agent/models.json", {"providers": {"localllm": provider}}),),
        (f"Start with: pi --provider localllm --model {t.model}",),
        ("chat", "tools"),
        checked="0.73.1",
    )
