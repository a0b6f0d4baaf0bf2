"""Connect a program to a server: read the server's models, print manual steps, write config
files."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localllm import paths
from localllm.cli.chat.engines import listed_models
from localllm.cli.editors.recipes import ClientRecipe, ClientTarget, ConfigFile, Shell, assignment
from localllm.errors import BackendError, NotFoundError, UsageError

_NUMBER = re.compile(r"\d+")


def target_of(base_url: str, model: str | None, api_key: str | None) -> ClientTarget:
    """Ask the server at `base_url` (…/v1) for its models.

    Raises
    * ServerUnreachableError,
    * UsageError if the key is missing or wrong,
    * BackendError if a model's name has control characters,
    * NotFoundError if the server does not serve `model`.
    """
    served = {str(entry["id"]): entry for entry in listed_models(base_url, api_key)}
    for name in served:
        if not name.isprintable():
            raise BackendError(
                f"the server at {base_url} lists a model with control characters in its name: "
                f"{name[:100]!a}",
                hint="connect to a server that you trust",
            )
    embedding_models = _with_capability(served, "embedding")
    if model is None:
        chat_models = [name for name in served if name not in embedding_models]
        model = next(iter(chat_models), None)
    if model is None or model not in served:
        raise NotFoundError(f"the server serves {', '.join(served) or 'nothing'}, not {model!r}")
    physics = served[model].get("physics") or {}
    # Autocomplete uses a served model that can fill in, even if the chat model can't.
    fill_in_models = _with_capability(served, "insert")
    other_fill_in_models = [name for name in fill_in_models if name != model]
    return ClientTarget(
        base_url.removesuffix("/v1"),
        model,
        int(served[model].get("context_length") or 4096),
        api_key,
        next(iter([*other_fill_in_models, *fill_in_models]), None),
        next(iter(embedding_models), None),
        max_context=int(physics.get("max_context") or 0),
    )


def _with_capability(served: dict[str, dict[str, Any]], capability: str) -> list[str]:
    """Return the names of the served models with a capability, in the server's order."""
    names = []
    for name, entry in served.items():
        if capability in (entry.get("capabilities") or ()):
            names.append(name)
    return names


def print_steps(recipe: ClientRecipe, shell: Shell, *, write: bool) -> None:
    """Print the manual steps for `shell`. With `write`, also write the files."""
    warn(recipe)
    if not write:
        _warn_outdated(recipe)
    for file in recipe.files:
        if write:
            print(write_file(file), file=sys.stderr)
        else:
            print(f"# {file.path}\n{file.shown()}\n")
    for name, value in recipe.environment.items():
        print(assignment(name, value, shell))
    for step in recipe.steps:
        print(f"- {step}")
    if write and not recipe.files:
        print(f"{recipe.name} has no configuration file: follow the steps above", file=sys.stderr)
    if not recipe.checked and recipe.probes:
        print(
            f"(from {recipe.name}'s documentation; not checked here with the program itself)",
            file=sys.stderr,
        )


def warn(recipe: ClientRecipe) -> None:
    """Print a warning if the program can't work with the server's current settings."""
    if recipe.warning:
        print(f"warning: {recipe.warning}", file=sys.stderr)


def _warn_outdated(recipe: ClientRecipe) -> None:
    """Print a warning if the program's files, or the shell's variables for it, are for other
    settings of the server."""
    for name, value in recipe.environment.items():
        old = os.environ.get(name, value)
        if old != value and old.isdecimal() and value.isdecimal():
            print(
                f"warning: this shell sets {name} for other settings of the server "
                f"({old} instead of {value}): set it as below",
                file=sys.stderr,
            )
    for file in recipe.files:
        outdated = dict(outdated_numbers(file))
        if outdated:
            pairs = ", ".join(f"{old} instead of {new}" for old, new in outdated.items())
            print(
                f"warning: {file.path} is for other settings of the server ({pairs}): "
                "write it again with --write",
                file=sys.stderr,
            )


def write_file(file: ConfigFile) -> str:
    """Write one configuration file and return a message about it.

    Existing settings are kept, and the old file is backed up. Raises UsageError if the change would
    lose content: JSON with comments, or an existing file of another format with different content.
    """
    path = file.path.resolve()  # follow links, so that the backup is next to the target
    old = None
    if path.exists():
        old = paths.file_text(path)
    if file.text is not None:
        new = file.text
        if old is not None and not _is_ours(path, old, new):
            raise UsageError(
                f"{path} already exists", hint="add the part printed without --write by hand"
            )
    else:
        new = json.dumps(_merged(file, old), indent=2, ensure_ascii=False) + "\n"
    if new == old:
        return f"{path} is up to date"
    path.parent.mkdir(parents=True, exist_ok=True)
    message = f"wrote {path}"
    if old is not None:
        backup = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}.bak")
        shutil.copy2(path, backup)
        message += f" (backup: {backup.name})"
    # The file may hold a key, and a crash must not leave half of it.
    paths.write_private(path, new)
    return message


def _is_ours(path: Path, old: str, new: str) -> bool:
    """True if `old` was written here: it differs from `new` only in numbers, such as the context."""
    same_but_numbers = _NUMBER.sub("0", old) == _NUMBER.sub("0", new)
    return same_but_numbers or path.name == "localllm.config.toml"


def outdated_numbers(file: ConfigFile) -> list[tuple[str, str]]:
    """Return the numbers of an existing file that no longer fit the server, with the right ones."""
    try:
        old = paths.file_text(file.path)
    except OSError:
        return []
    if file.text is not None:
        if not _is_ours(file.path, old, file.text):
            return []
        pairs = zip(_NUMBER.findall(old), _NUMBER.findall(file.text), strict=False)
        return [pair for pair in pairs if pair[0] != pair[1]]
    try:
        merged = _merged(file, old)
        return list(_changed_numbers(json.loads(old or "null"), merged))
    except (UsageError, ValueError):
        return []


def _changed_numbers(old: Any, new: Any) -> Iterator[tuple[str, str]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() & new.keys():
            yield from _changed_numbers(old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list):
        for old_item, new_item in zip(old, new, strict=False):
            yield from _changed_numbers(old_item, new_item)
    elif type(old) is int and type(new) is int and old != new:
        yield str(old), str(new)


def _merged(file: ConfigFile, old: str | None) -> Any:
    try:
        if old and old.strip():
            value = json.loads(old)
        elif file.merge_list_by:
            value = []
        else:
            value = {}
    except ValueError as e:
        raise UsageError(
            f"{file.path} has comments or is not JSON, and writing it would lose them",
            hint="add the part printed without --write by hand",
        ) from e
    key = file.merge_list_by
    if not key:
        return deep_merge(value, file.merge)
    replaced = {entry[key] for entry in file.merge}
    other_entries = []
    for entry in value:
        if not isinstance(entry, dict) or entry.get(key) not in replaced:
            other_entries.append(entry)
    return [*other_entries, *file.merge]


def deep_merge(old: Any, new: Any) -> Any:
    """Merge `new` into `old`: objects are merged key by key, other values are replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    merged = dict(old)
    for key, value in new.items():
        merged[key] = deep_merge(old.get(key), value)
    return merged
