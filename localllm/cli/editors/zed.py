"""Zed."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def zed(t: Target, home: Path) -> Recipe:
    """Zed: an OpenAI-compatible provider; the key comes from an environment variable."""
    model = {
        "name": t.model,
        "display_name": f"{t.model} (this machine)",
        "max_tokens": t.n_ctx,
        "max_output_tokens": t.answer_tokens,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False},
    }
    provider = {"api_url": f"{t.url}/v1", "available_models": [model]}
    return Recipe(
        "Zed",
        (
            ConfigFile(
                home / ".config/zed/settings.json",
                {"language_models": {"openai_compatible": {"localllm": provider}}},
            ),
        ),
        ("Choose the model in the Agent Panel.",),
        ("chat", "tools"),
        {"LOCALLLM_API_KEY": t.key},
    )
