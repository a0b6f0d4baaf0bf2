"""Connect a program to a server: read the server's models, print manual steps, write config files."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Any

from localllm import paths
from localllm.cli.chat.engines import listed_models
from localllm.cli.editors.recipes import ClientRecipe, ClientTarget, ConfigFile, Shell, assignment
from localllm.errors import BackendError, NotFoundError, UsageError


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
                f"the server at {base_url} names a model with control characters: {name[:100]!a}",
                hint="connect to a server that you trust",
            )
    embeds = _with_capability(served, "embedding")
    if model is None:
        chats = [name for name in served if name not in embeds]
        model = next(iter(chats), None)
    if model is None or model not in served:
        raise NotFoundError(f"the server serves {', '.join(served) or 'nothing'}, not {model!r}")
    physics = served[model].get("physics") or {}
    # Autocomplete uses a served model that can fill in, even if the chat model can't.
    fills = _with_capability(served, "insert")
    others = [name for name in fills if name != model]
    return ClientTarget(
        base_url.removesuffix("/v1"),
        model,
        int(served[model].get("context_length") or 4096),
        api_key,
        next(iter([*others, *fills]), None),
        next(iter(embeds), None),
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
        print(f"{recipe.name} has no file to write: follow the steps above", file=sys.stderr)
    if not recipe.checked and recipe.probes:
        print(
            f"(from {recipe.name}'s documentation; not checked here with the program itself)",
            file=sys.stderr,
        )


def warn(recipe: ClientRecipe) -> None:
    """Print a warning if the program can't work with the server's current settings."""
    if recipe.warning:
        print(f"warning: {recipe.warning}", file=sys.stderr)


def write_file(file: ConfigFile) -> str:
    """Write one configuration file and return a message about it.

    Existing settings are kept, and the old file is backed up. Raises UsageError if the change would
    lose content: JSON with comments, or an existing file of another format with different content.
    """
    path = file.path.resolve()  # follow links, so that the backup is next to the target
    old = None
    if path.exists():
        old = path.read_text(encoding="utf-8")
    if file.text is not None:
        new = file.text
        if old is not None and old != new and path.name != "localllm.config.toml":
            raise UsageError(
                f"{path} exists already", hint="add the part printed without --write by hand"
            )
    else:
        new = json.dumps(_merged(file, old), indent=2, ensure_ascii=False) + "\n"
    if new == old:
        return f"{path} is up to date"
    path.parent.mkdir(parents=True, exist_ok=True)
    said = f"wrote {path}"
    if old is not None:
        backup = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}.bak")
        shutil.copy2(path, backup)
        said += f" (the old one is {backup.name})"
    # The file may hold a key, and a crash must not leave half of it.
    paths.write_private(path, new)
    return said


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
    kept = []
    for entry in value:
        if not isinstance(entry, dict) or entry.get(key) not in replaced:
            kept.append(entry)
    return [*kept, *file.merge]


def deep_merge(old: Any, new: Any) -> Any:
    """Merge `new` into `old`: objects are merged key by key, other values are replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    merged = dict(old)
    for key, value in new.items():
        merged[key] = deep_merge(old.get(key), value)
    return merged
