"""opencode."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def opencode(t: Target, home: Path) -> Recipe:
    """opencode: a provider through the AI SDK."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "localllm",
        "options": {"baseURL": f"{t.url}/v1", "apiKey": t.key},
        "models": {t.model: {"name": t.model, "limit": {"context": t.n_ctx, "output": t.answer_tokens}}},
    }
    merge = {"$schema": "https://opencode.ai/config.json", "provider": {"localllm": provider}}
    return Recipe(
        "opencode",
        (ConfigFile(home / ".config/opencode/opencode.json", merge),),
        (f"Start with: opencode --model localllm/{t.model}",),
        ("chat", "tools"),
        checked="1.18.33",
    )
