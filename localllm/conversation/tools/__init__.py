"""Tool-call formats, one small file each; a model's format is told from its own template."""

from __future__ import annotations

from localllm.conversation.tools import (
    apertus,
    apriel,
    cohere,
    deepseek,
    dsml,
    function_gemma,
    gemma4,
    gigachat,
    glm,
    harmony,
    hermes,
    kimi,
    kimi_k3,
    lfm,
    llama3,
    minicpm,
    minimax,
    minimax_m3,
    mistral,
    muse,
    nemotron_v2,
    phi,
    qwen_coder,
    seed,
)
from localllm.conversation.tools.base import ToolFormat

DEFAULT = hermes.FORMAT
# In the order of asking: several templates mention <tool_call>, so the ones with a surer sign come first.
FORMATS: tuple[ToolFormat, ...] = (
    harmony.FORMAT,
    muse.FORMAT,
    minimax_m3.FORMAT,
    minimax.FORMAT,
    kimi_k3.FORMAT,
    kimi.FORMAT,
    dsml.FORMAT,
    deepseek.FORMAT,
    cohere.FORMAT,
    gigachat.FORMAT,
    apertus.FORMAT,
    minicpm.FORMAT,
    nemotron_v2.FORMAT,
    apriel.FORMAT,
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


def told_from(template: str) -> ToolFormat | None:
    """The format that `template` shows signs of, if any."""
    return next((f for f in FORMATS if any(sign in template for sign in f.signs)), None)


def format_for(template: str) -> ToolFormat:
    """The format that `template` writes; the default where it shows no sign of any."""
    return told_from(template) or DEFAULT


def unread(template: str) -> bool:
    """True where `template` offers tools itself but shows no sign of a format known here."""
    return "tools" in template and told_from(template) is None
