"""JetBrains AI Assistant."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import Recipe, Target


def jetbrains(t: Target, home: Path) -> Recipe:
    """JetBrains AI Assistant: settings inside the IDE."""
    return Recipe(
        "JetBrains AI Assistant",
        steps=(
            "Settings > Tools > AI Assistant > Models: choose `OpenAI-compatible` (or `Ollama`).",
            f"URL: {t.url}/v1 (for Ollama: {t.url}); test the connection.",
            f"Choose {t.model} for the features you want; set the context window to {t.n_ctx}.",
        ),
        probes=("models", "chat", "ollama"),
    )
