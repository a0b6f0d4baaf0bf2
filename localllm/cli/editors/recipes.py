"""Recipes for connecting programs: recipes.toml, filled in for one server.

client_runs.json has what runs of the programs measured. `make bench ARGS="clients table"` writes it.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from localllm.errors import NotFoundError

Probe = Literal["models", "chat", "tools", "responses", "anthropic", "ollama", "fim"]
# The shell for printed commands. sh covers all shells with POSIX quoting, and fish.
Shell = Literal["sh", "powershell"]

# Claude Code treats a smaller window as an error.
_MIN_COMPACT_WINDOW = 100_000
_PLACEHOLDER = re.compile(r"\{([?!]?)([a-z_]+)(:json|:word)?\}")
# PowerShell treats typographic quotes as single quotes (about_Quoting_Rules).
_POWERSHELL_QUOTE = re.compile("(['\u2018\u2019\u201a\u201b])")


@dataclass(frozen=True, slots=True)
class ClientTarget:
    """The server to connect to.

    `url`: without a path.
    `model`, `n_ctx`: one of its models, and its context in tokens.
    `autocomplete`, `embedding`: models that complete code and make embeddings, if any.
    `max_context`: the longest context of the model for which its machine has memory (0: unknown).
    `shell`: the shell for the printed commands.
    """

    url: str
    model: str
    n_ctx: int
    api_key: str | None = None
    autocomplete: str | None = None
    embedding: str | None = None
    shell: Shell = "powershell" if sys.platform == "win32" else "sh"
    max_context: int = 0

    @property
    def key(self) -> str:
        """The key, or a placeholder for clients that require one."""
        return self.api_key or "local"

    @property
    def answer_tokens(self) -> int:
        """Tokens reserved for the answer, for clients that limit input and output separately."""
        return max(256, min(8192, self.n_ctx // 4))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file to write. `merge` is merged into existing JSON; `text` is a complete file of our
    own."""

    path: Path
    merge: Any = None
    text: str | None = None
    merge_list_by: str = ""

    def shown(self) -> str:
        if self.text is not None:
            return self.text
        return json.dumps(self.merge, indent=2)


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How to start a program for one process only.

    `environment`: variables in addition to those of its recipe.
    `without`: variables of the user that are hidden from it.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientRecipe:
    """How to connect one program.

    `checked`: the version that completed a full tool loop with this configuration ("": the recipe
    is based only on documentation).
    `warning`: the reason if the program can't work with the server's current settings.
    """

    name: str
    files: tuple[ConfigFile, ...] = ()
    steps: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ("models", "chat")
    environment: Mapping[str, str] = field(default_factory=dict)
    checked: str = ""
    run: ProcessSettings | None = None
    warning: str = ""


def values(target: ClientTarget) -> dict[str, Any]:
    """Return the values for placeholders in recipes. Text with a placeholder that is None is left
    out."""
    compact_window = None
    if target.n_ctx >= _MIN_COMPACT_WINDOW:
        compact_window = target.n_ctx
    chat_roles = "chat, edit, apply"
    autocomplete_apart = target.autocomplete
    if target.autocomplete == target.model:
        chat_roles = "chat, edit, apply, autocomplete"
        autocomplete_apart = None
    xcode_provider = f"`Internet Hosted`, URL {target.url}"
    if "127.0.0.1" in target.url:
        xcode_provider = f"`Locally Hosted`, port {urlsplit(target.url).port}"
    names = {
        "model": target.model,
        "local_model": f"local/{target.model}",
        "provider_model": f"localllm/{target.model}",
        "autocomplete": target.autocomplete,
        "autocomplete_apart": autocomplete_apart,
        "chat_roles": chat_roles,
        "embedding": target.embedding,
    }
    numbers = {
        "n_ctx": target.n_ctx,
        "answer_tokens": target.answer_tokens,
        "prompt_tokens": target.n_ctx - target.answer_tokens,
        "compact_window": compact_window,
    }
    return {
        **names,
        **numbers,
        "shell": target.shell,
        "url": target.url,
        "key": target.key,
        "api_key": target.api_key,
        "python": sys.executable,
        "xcode_provider": xcode_provider,
    }


def quoted(text: str, shell: Shell) -> str:
    """Quote `text` as one word of `shell`."""
    if shell == "powershell":
        doubled = _POWERSHELL_QUOTE.sub(r"\1\1", text)
        return f"'{doubled}'"
    if not text:
        return "''"
    # Outside quotes, sh and fish treat a backslash alike. Inside quotes, fish treats it as an
    # escape.
    parts = [part and shlex.quote(part) for part in text.split("\\")]
    return r"\\".join(parts)


def assignment(name: str, value: str, shell: Shell) -> str:
    """Return the command that sets an environment variable in `shell`."""
    word = quoted(value, shell)
    if shell == "powershell":
        return f"$env:{name} = {word}"
    return f"export {name}={word}"


def _fill_in(text: str, place_values: Mapping[str, Any]) -> str | None:
    """Fill in the placeholders of `text`. Returns None if the text is to be left out."""
    for sign, name, _ in _PLACEHOLDER.findall(text):
        if (place_values[name] is None) != (sign == "!"):
            return None

    def value(place: re.Match[str]) -> str:
        sign, name, form = place.groups()
        if sign:
            return ""
        if form == ":word":
            return quoted(str(place_values[name]), place_values["shell"])
        if form:
            return json.dumps(place_values[name])
        return str(place_values[name])

    return _PLACEHOLDER.sub(value, text)


def _fill_in_json(value: Any, place_values: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {
            _fill_in(key, place_values): _fill_in_json(item, place_values)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_fill_in_json(item, place_values) for item in value]
    if not isinstance(value, str):
        return value
    placeholder = _PLACEHOLDER.fullmatch(value)
    if placeholder:
        return place_values[placeholder[2]]
    return _fill_in(value, place_values)


def _fill_in_texts(texts: Iterable[str], place_values: Mapping[str, Any]) -> tuple[str, ...]:
    filled = [_fill_in(text, place_values) for text in texts]
    return tuple(text for text in filled if text is not None)


def _file(entry: Mapping[str, Any], place_values: Mapping[str, Any], home: Path) -> ConfigFile:
    path = home / entry["path"]
    if "text" in entry:
        parts = [part.lstrip("\n") for part in entry["text"]]
        return ConfigFile(path, text="".join(_fill_in_texts(parts, place_values)))
    merge = _fill_in_json(json.loads(entry["json"]), place_values)
    return ConfigFile(path, merge, merge_list_by=entry.get("merge_list_by", ""))


def _recipe(
    entry: Mapping[str, Any], measured: Mapping[str, Any], target: ClientTarget, home: Path
) -> ClientRecipe:
    place_values = values(target)
    files: tuple[ConfigFile, ...] = ()
    if "file" in entry:
        file = _file(entry["file"], place_values, home)
        files = (file,)
        place_values |= {"file": str(file.path), "folder": str(file.path.parent)}
    run = None
    if "run" in entry:
        run_entry = entry["run"]
        command = _fill_in_texts(run_entry["command"], place_values)
        run = ProcessSettings(
            command, _variables(run_entry, place_values), tuple(run_entry.get("without", ()))
        )
    return ClientRecipe(
        entry["name"],
        files,
        _fill_in_texts(entry.get("steps", ()), place_values),
        tuple(entry.get("probes", ("models", "chat"))),
        _variables(entry, place_values),
        measured.get("version", ""),
        run,
        _context_warning(entry["name"], int(measured.get("own_prompt_tokens", 0)), target),
    )


def _context_warning(name: str, prompt_tokens: int, target: ClientTarget) -> str:
    """Return a warning if the program's own prompt, of `prompt_tokens` tokens, is longer than the
    context."""
    if not prompt_tokens or target.n_ctx >= prompt_tokens + target.answer_tokens:
        return ""
    max_context = target.max_context or 2 * prompt_tokens
    advice = f"serve with --context {min(2 * prompt_tokens, max_context)}"
    if max_context < prompt_tokens + target.answer_tokens:
        advice = "use another agent or model: no --context is large enough"
    if target.max_context:
        advice += f" ({target.max_context} is the largest that the model and the memory allow)"
    return (
        f"{name}'s own prompt has about {prompt_tokens} tokens, but {target.model} is served "
        f"with a context of {target.n_ctx}: {advice}"
    )


def _variables(entry: Mapping[str, Any], place_values: Mapping[str, Any]) -> dict[str, str]:
    filled = {
        name: _fill_in(text, place_values) for name, text in entry.get("environment", {}).items()
    }
    return {name: text for name, text in filled.items() if text is not None}


def recipe_named(
    name: str, *, to_run: bool = False
) -> Callable[[ClientTarget, Path], ClientRecipe]:
    """Return the recipe called `name`, or the one for the program of that name.

    Raises NotFoundError with the closest match. `to_run`: the error names only the clients that
    `localllm run` can start.
    """
    recipe = RECIPES.get(name.lower()) or _BY_PROGRAM.get(name.lower())
    if recipe is None:
        names = [*RECIPES]
        if to_run:
            names = [name for name, entry in _ENTRIES.items() if "run" in entry]
        closest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        hints = [f"did you mean {closest[0]}?"] if closest else []
        if to_run:
            hints.append(f"`run` starts coding agents; `localllm chat {name}` chats with a model")
        hint = " ".join(hints) or None
        raise NotFoundError(f"no recipe for {name!r}; known: {', '.join(names)}", hint=hint)
    return recipe


def _package_text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


_ENTRIES = tomllib.loads(_package_text("recipes.toml"))
_CLIENT_RUNS = json.loads(_package_text("client_runs.json"))
RECIPES: Mapping[str, Callable[[ClientTarget, Path], ClientRecipe]] = {
    name: partial(_recipe, entry, _CLIENT_RUNS.get(name, {})) for name, entry in _ENTRIES.items()
}
_BY_PROGRAM = {
    entry["name"].lower().replace(" ", "-"): RECIPES[name] for name, entry in _ENTRIES.items()
}
