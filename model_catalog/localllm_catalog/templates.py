"""What a chat template gives away about a model: how it calls tools, and the tags around its reasoning."""

from __future__ import annotations

# First match wins: the more specific marker stands above the one it contains.
_TOOL_MARKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "functions.")),
    ("qwen3-coder-xml", ("<tool_call>", "<function=")),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("hermes-json", ("<tool_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("minimax-xml", ("<minimax:tool_call>",)),
    ("seed-xml", ("<seed:tool_call>",)),
    ("lfm2-pythonic", ("<|tool_call_start|>",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("llama3-json", ("<|python_tag|>",)),
)

_REASONING: tuple[tuple[str, tuple[str, str]], ...] = (
    ("<|channel|>analysis", ("<|channel|>analysis", "<|channel|>final")),
    ("<seed:think>", ("<seed:think>", "</seed:think>")),
    ("[THINK]", ("[THINK]", "[/THINK]")),
    ("<think>", ("<think>", "</think>")),
)


def tool_format(template: str) -> str | None:
    """The catalog's name of the tool-call format a chat template writes, None if it shows none known."""
    return next((name for name, markers in _TOOL_MARKERS if all(marker in template for marker in markers)), None)


def reasoning_tags(template: str) -> tuple[str, str] | None:
    """Opening and closing marker of the reasoning a chat template knows of, None if it shows none."""
    return next((tags for marker, tags in _REASONING if marker in template), None)
