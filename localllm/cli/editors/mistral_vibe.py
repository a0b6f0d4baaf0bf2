"""Mistral Vibe."""

from __future__ import annotations

import json
from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def vibe(t: Target, home: Path) -> Recipe:
    """Mistral Vibe: a provider and a model in its TOML."""
    text = "\n".join(
        [
            'active_model = "localllm"',
            "",
            "[[providers]]",
            'name = "localllm"',
            f'api_base = "{t.url}/v1"',
            'api_key_env_var = "LOCALLLM_API_KEY"',
            'api_style = "openai"',
            'backend = "generic"',
            "",
            "[[models]]",
            f"name = {json.dumps(t.model)}",
            'provider = "localllm"',
            'alias = "localllm"',
            f"auto_compact_threshold = {t.n_ctx - t.answer_tokens}",
            "",
        ]
    )
    file = ConfigFile(home / ".vibe/config.toml", text=text)
    return Recipe("Mistral Vibe", (file,), probes=("chat", "tools"), environment={"LOCALLLM_API_KEY": t.key})
