"""GitHub's Copilot CLI."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import Recipe, Target


def copilot(t: Target, home: Path) -> Recipe:
    """Copilot CLI: a provider of one's own, without an account and without the network."""
    return Recipe(
        "Copilot CLI",
        steps=("Start it in a shell with these variables.",),
        probes=("chat", "tools"),
        environment={
            "COPILOT_PROVIDER_BASE_URL": f"{t.url}/v1",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": t.key,
            "COPILOT_MODEL": t.model,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(t.n_ctx - t.answer_tokens),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(t.answer_tokens),
            "COPILOT_OFFLINE": "true",
        },
        checked="1.0.102",
    )
