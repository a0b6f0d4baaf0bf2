"""All clients, in the order of the table."""

from benchmarks.clients.agents import (
    aider,
    claude,
    cline,
    codex,
    continue_cli,
    copilot,
    kilo,
    libraries,
    llm,
    mini_swe,
    opencode,
    pi,
    qwen,
    vibe,
)

AGENTS = (
    codex.AGENT, claude.AGENT, opencode.AGENT, aider.AGENT, qwen.AGENT, cline.AGENT,
    continue_cli.AGENT, copilot.AGENT, kilo.AGENT, vibe.AGENT,
    pi.AGENT, mini_swe.AGENT, llm.AGENT, *libraries.AGENTS,
)  # fmt: skip
