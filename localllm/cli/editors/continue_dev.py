"""Continue, in the editor and in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from localllm.cli.editors.recipe import ConfigFile, Recipe, Target


def continue_(t: Target, home: Path) -> Recipe:
    """Continue: its YAML configuration, one entry per role where several models are served."""

    def entry(model: str, roles: str, *more: str) -> list[str]:
        return [
            f"  - name: {json.dumps(model)}",
            "    provider: openai",
            f"    model: {json.dumps(model)}",
            f"    apiBase: {t.url}/v1",
            f"    apiKey: {json.dumps(t.key)}",
            f"    roles: [{roles}]",
            *more,
        ]

    window = ("    defaultCompletionOptions:", f"      contextLength: {t.n_ctx}")
    roles = "chat, edit, apply, autocomplete" if t.autocomplete == t.model else "chat, edit, apply"
    lines = ["name: localllm", "version: 1.0.0", "schema: v1", "models:"]
    lines += entry(t.model, roles, "    capabilities: [tool_use]", *window)
    if t.autocomplete not in (None, t.model):
        lines += entry(str(t.autocomplete), "autocomplete")
    if t.embedding is not None:
        lines += entry(t.embedding, "embed")
    missing = (
        "For autocomplete, serve a model with fill-in-the-middle tokens too: `localllm serve MODEL --also FIM_MODEL`."
    )
    return Recipe(
        "Continue",
        (ConfigFile(home / ".continue/config.yaml", text="\n".join([*lines, ""])),),
        () if t.autocomplete else (missing,),
        ("chat", "tools"),
        checked="CLI 1.5.47",
    )
