"""Claude Code."""

from __future__ import annotations

from pathlib import Path

from localllm.cli.editors.recipe import Recipe, Target

# It takes a smaller one for a mistake.
_LEAST_COMPACT_WINDOW = 100_000


def claude(t: Target, home: Path) -> Recipe:
    """Claude Code: environment variables. Every name it may ask for is ours: it uses the small ones for titles."""
    return Recipe(
        "Claude Code",
        steps=("Start it in a shell with these variables.",),
        probes=("anthropic",),
        environment={
            "ANTHROPIC_BASE_URL": t.url,
            "ANTHROPIC_AUTH_TOKEN": t.key,
            "ANTHROPIC_MODEL": t.model,
            **{f"ANTHROPIC_DEFAULT_{size}_MODEL": t.model for size in ("HAIKU", "SONNET", "OPUS")},
            "CLAUDE_CODE_SUBAGENT_MODEL": t.model,
            # The window of models whose name it doesn't know; it reckons with 200,000 tokens otherwise.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(t.n_ctx),
            **({"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(t.n_ctx)} if t.n_ctx >= _LEAST_COMPACT_WINDOW else {}),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(t.answer_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        checked="2.1.197",
    )
