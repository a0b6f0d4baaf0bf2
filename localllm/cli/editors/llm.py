"""The `llm` command."""

from __future__ import annotations

import json
from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def llm(t: Target, home: Path) -> Recipe:
    """The `llm` command: a list of extra OpenAI-compatible models."""
    text = "\n".join(
        [
            f"- model_id: {json.dumps('local/' + t.model)}",
            f"  model_name: {json.dumps(t.model)}",
            f"  api_base: {t.url}/v1",
            "  can_stream: true",
            "  supports_schema: true",
            "  supports_tools: true",
            "",
        ]
    )
    return Recipe(
        "llm",
        (ConfigFile(home / ".config/io.datasette.llm/extra-openai-models.yaml", text=text),),
        (f"Try it: llm -m local/{t.model} 'Hello'", *(("Store the key: llm keys set openai",) if t.api_key else ())),
        ("chat", "tools"),
        checked="0.36",
    )
