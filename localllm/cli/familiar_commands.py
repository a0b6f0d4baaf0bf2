"""Commands and options that users of Ollama, llama.cpp and package managers type, and what to run
here."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.errors import UsageError

# The options that print a command's help.
HELP = ("-h", "--help")
_COMMANDS = {
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

# Options of llama-server, and how to say the same here.
_NO_OPTION = "name the model without an option: `localllm serve FILE`"
_PULL_HINT = "`localllm pull ORG/NAME` downloads a model, and `localllm serve NAME` serves it"
_SERVE_HINTS = {
    "-m": _NO_OPTION,
    "--model": _NO_OPTION,
    "-hf": _PULL_HINT,
    "--hf-repo": _PULL_HINT,
    "-c": "use --context N (default: what fits)",
    "--ctx-size": "use --context N (default: what fits)",
    "-ngl": "use --gpu-layers N (default: as many as fit)",
    "--n-gpu-layers": "use --gpu-layers N (default: as many as fit)",
    "-np": "use --parallel N (default: 8)",
    "-md": "use --draft MODEL (default: auto)",
    "--model-draft": "use --draft MODEL (default: auto)",
    "-ctk": "use --kv-type TYPE for keys and values, or q8_0/q4_0 for both",
    "-ctv": "use --kv-type TYPE for keys and values, or q8_0/q4_0 for both",
    "-fa": "leave it out: flash attention is used where it helps",
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
    if first in _COMMANDS:
        return [*_COMMANDS[first], *rest]
    if first in _HINTS:
        raise UsageError(f"localllm has no command {first!r}", hint=_HINTS[first])
    if first == "serve":
        _refuse_options_of_llama_server(rest)
    return list(typed)


def _refuse_options_of_llama_server(words: Sequence[str]) -> None:
    for word in words:
        option = word.partition("=")[0]
        if option in _SERVE_HINTS:
            raise UsageError(f"serve has no option {option}", hint=_SERVE_HINTS[option])
