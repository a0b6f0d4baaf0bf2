"""Codex CLI."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target

_PRINT_KEY = "import os; print(os.environ.get('LOCALLLM_API_KEY') or 'local')"


def codex(t: Target, home: Path) -> Recipe:
    """Codex CLI: a profile file of our own, so the user's configuration stays as it is."""
    text = "\n".join(
        [
            f"model = {json.dumps(t.model)}",
            'model_provider = "localllm"',
            f"model_context_window = {t.n_ctx}",
            "",
            "[model_providers.localllm]",
            'name = "localllm"',
            f'base_url = "{t.url}/v1"',
            'wire_api = "responses"',
            "",
            # Codex asks a server what it knows of its models only where a command gives the key.
            "[model_providers.localllm.auth]",
            f"command = {json.dumps(sys.executable)}",
            f"args = {json.dumps(['-c', _PRINT_KEY])}",
            "",
        ]
    )
    return Recipe(
        "Codex CLI",
        (ConfigFile(home / ".codex/localllm.config.toml", text=text),),
        ("Start with: codex --profile localllm",),
        ("models", "responses"),
        {"LOCALLLM_API_KEY": t.api_key} if t.api_key else {},
        checked="0.169.0",
    )
