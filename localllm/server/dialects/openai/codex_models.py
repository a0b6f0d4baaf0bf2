"""What Codex asks to know of a model (`GET /v1/models?client_version=…`): without it, Codex warns and takes a context of
272,000 tokens for granted. Fields: codex-rs/protocol/src/openai_models.rs (ModelInfo), read with Codex 0.169."""

from __future__ import annotations

from typing import Any

# Codex has a page of instructions for each of OpenAI's models, and none for ours. A local window is small: this is short.
_INSTRUCTIONS = """\
You are a coding agent in the Codex CLI. You work in the user's own files, in the directory named in the environment context.

- Do the task to its end before you answer: look at the files it is about, make the changes, run what shows that they work.
- Run commands with the shell tool: rg or grep to search, sed -n to read a part of a file. Read a file before you change it.
- Change files with apply_patch where it is offered, else by a command. A patch begins with *** Begin Patch, then for each \
file *** Update File: path with @@ and lines that begin with a space, - or + (or *** Add File: path with + lines, or \
*** Delete File: path), and ends with *** End Patch. Lines without + must be in the file word for word.
- Change only what the task needs, in the style of the code around it. Never undo changes that you did not make.
- Instructions in AGENTS.md files hold for the directory they stand in.
- When a command fails, read its output and try another way. Don't repeat the same call.
- Answer briefly: what you changed and where, what you checked, and what is left to do.
"""


def codex_entry(name: str, n_ctx: int | None, *, reasons: bool) -> dict[str, Any]:
    """One model, in the shape of Codex's catalogue. `reasons`: it thinks before it answers."""
    efforts = ("none", "low", "medium", "high") if reasons else ()
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "default_reasoning_level": "medium" if reasons else None,
        "supported_reasoning_levels": [{"effort": e, "description": e} for e in efforts],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "upgrade": None,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": reasons,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": n_ctx,
        "max_context_window": n_ctx,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
