"""Tool-call formats, one small file each; a model's format is told from its own template."""

from __future__ import annotations

from localllm.conversation.tools import (
    deepseek,
    function_gemma,
    gemma4,
    glm,
    harmony,
    hermes,
    kimi,
    lfm,
    llama3,
    minimax,
    mistral,
    phi,
    qwen_coder,
    seed,
)
from localllm.conversation.tools.base import ToolFormat

DEFAULT = hermes.FORMAT
# In the order of asking: several templates mention <tool_call>, so the ones with a surer sign come first.
FORMATS: tuple[ToolFormat, ...] = (
    harmony.FORMAT,
    minimax.FORMAT,
    kimi.FORMAT,
    deepseek.FORMAT,
    seed.FORMAT,
    qwen_coder.FORMAT,
    glm.FORMAT,
    lfm.FORMAT,
    function_gemma.FORMAT,
    gemma4.FORMAT,
    mistral.FORMAT,
    phi.FORMAT,
    hermes.FORMAT,
    llama3.FORMAT,
)


def format_for(template: str) -> ToolFormat:
    """The format that `template` writes; the default where it shows no sign of any."""
    return next((f for f in FORMATS if any(sign in template for sign in f.signs)), DEFAULT)
