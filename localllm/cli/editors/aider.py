"""aider."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def aider(t: Target, home: Path) -> Recipe:
    """aider: the model's limits in its metadata file, the rest on the command line."""
    known = {
        f"openai/{t.model}": {
            "max_input_tokens": t.n_ctx,
            "max_output_tokens": t.answer_tokens,
            "max_tokens": t.answer_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
    return Recipe(
        "aider",
        (ConfigFile(home / ".aider.model.metadata.json", known),),
        (f"Start with: aider --model openai/{t.model}",),
        ("chat",),
        {"OPENAI_API_BASE": f"{t.url}/v1", "OPENAI_API_KEY": t.key},
        checked="0.86.2",
    )
