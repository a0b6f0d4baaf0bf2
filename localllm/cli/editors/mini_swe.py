"""mini-swe-agent."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import Recipe, Target


def mini(t: Target, home: Path) -> Recipe:
    """mini-swe-agent: environment variables, some of them LiteLLM's, through which it calls."""
    return Recipe(
        "mini-swe-agent",
        steps=(f"Start with: mini -m openai/{t.model}",),
        probes=("chat", "tools"),
        environment={
            "OPENAI_API_BASE": f"{t.url}/v1",
            "OPENAI_API_KEY": t.key,
            "MSWEA_MODEL_NAME": f"openai/{t.model}",
            "MSWEA_CONFIGURED": "true",
            # A local model has no price, and it takes that for a mistake.
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        checked="2.4.6",
    )
