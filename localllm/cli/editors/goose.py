"""Goose."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import Recipe, Target


def goose(t: Target, home: Path) -> Recipe:
    """Goose: environment variables."""
    return Recipe(
        "Goose",
        steps=("Start it in a shell with these variables: goose session",),
        probes=("models", "chat", "tools"),
        environment={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": t.model,
            "GOOSE_CONTEXT_LIMIT": str(t.n_ctx),
            "OPENAI_HOST": t.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": t.key,
        },
    )
