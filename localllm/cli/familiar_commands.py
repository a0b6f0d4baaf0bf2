"""Commands that users of Ollama, llama.cpp and package managers type, and what to run here."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.errors import UsageError

# The options that print a command's help.
HELP = ("-h", "--help")
_SAME = {
    "list": ("models", "list"),
    "rm": ("models", "rm"),
    "show": ("models", "info"),
    "version": ("--version",),
}
_HINTS = {
    "ps": "`localllm ls` lists the installed models. GET /api/ps of a server lists the loaded ones",
    "stop": "Ctrl-C stops `localllm serve`, and `localllm service stop` stops the service",
    "update": "use `localllm catalog update` for the models, `localllm setup --engine latest` for "
    "llama.cpp, and your package manager for localllm",
    "search": "`localllm recommend` lists models that fit this machine, and `localllm pull ORG/NAME` "
    "downloads any other",
}


def translated(typed: Sequence[str]) -> list[str]:
    """Return the words of a command line with another program's command replaced by ours.

    Raises UsageError with a hint if no single command does the same.
    """
    if not typed:
        return []
    first, *rest = typed
    if first == "help":
        return [*rest, "--help"]
    if first in _SAME:
        return [*_SAME[first], *rest]
    if first in _HINTS:
        raise UsageError(f"localllm has no command {first!r}", hint=_HINTS[first])
    return list(typed)
