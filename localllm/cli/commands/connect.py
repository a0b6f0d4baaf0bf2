"""`localllm connect EDITOR`: the exact configuration for an editor or agent, written on request,
checked by a tool loop."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm import paths
from localllm.errors import BackendError, LocalLLMError, NotFoundError, UsageError

if TYPE_CHECKING:
    from localllm.cli.editors.recipes import ClientRecipe, ClientTarget, ConfigFile, Probe, Shell

_TIMEOUT_S = 120.0


def connect(
    editor: Annotated[
        str,
        typer.Argument(
            metavar="EDITOR", help="codex, claude, opencode, aider, continue, cline, zed, vscode, …"
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Which served model.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Address of the server (default: this machine's).")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key, if it has one.")] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the configuration, keeping a backup.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Make that editor's calls to the running server.")
    ] = False,
) -> None:
    """Print (or write) the configuration that connects EDITOR to the running server."""
    from localllm.cli.chat.engines import address_and_key
    from localllm.cli.editors.recipes import recipe_named
    from localllm.settings import Settings

    recipe_of = recipe_named(editor)
    base_url, key = address_and_key(url or f"127.0.0.1:{Settings().value('port')}", api_key)
    target = target_of(base_url, model, key)
    recipe = recipe_of(target, Path.home())
    _print_steps(recipe, target.shell, write)
    if check:
        failures = run_checks(target, recipe.probes)
        if failures:
            raise LocalLLMError(f"{failures} of {recipe.name}'s calls failed")


def _print_steps(recipe: ClientRecipe, shell: Shell, write: bool) -> None:
    """Print what is to be done by hand in `shell`, and with `write` write the files."""
    from localllm.cli.editors.recipes import assignment

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
    """Print why the program can't work as the server runs now, where that is so."""
    if recipe.warning:
        print(f"warning: {recipe.warning}", file=sys.stderr)


def _check_names(base: str, served: Iterable[str]) -> None:
    """Raises BackendError for names that no terminal or file should be given."""
    hidden = next((name for name in served if not name.isprintable()), None)
    if hidden is not None:
        raise BackendError(
            f"the server at {base} names a model with control characters: {hidden[:100]!a}",
            hint="connect to a server that you trust",
        )


def target_of(base_url: str, model: str | None, api_key: str | None) -> ClientTarget:
    """Ask the server at `base_url` (…/v1) what it serves. Raises ServerUnreachableError, UsageError
    for its key, BackendError for names that no terminal or file should be given, or NotFoundError
    for a model it does not serve."""
    from localllm.cli.chat.engines import listed_models
    from localllm.cli.editors.recipes import ClientTarget

    served = {str(entry["id"]): entry for entry in listed_models(base_url, api_key)}
    _check_names(base_url, served)
    can = {name: entry.get("capabilities") or () for name, entry in served.items()}
    name = model or next((n for n in served if "embedding" not in can[n]), None)
    if name is None or name not in served:
        raise NotFoundError(f"the server serves {', '.join(served) or 'nothing'}, not {name!r}")
    physics = served[name].get("physics") or {}
    # The model for autocomplete is the one served beside the chat's, where that can fill in.
    fills = sorted((n for n in served if "insert" in can[n]), key=lambda n: n == name)
    embeds = [n for n in served if "embedding" in can[n]]
    return ClientTarget(
        base_url.removesuffix("/v1"),
        name,
        int(served[name].get("context_length") or 4096),
        api_key,
        next(iter(fills), None),
        next(iter(embeds), None),
        max_context=int(physics.get("max_context") or 0),
    )


def write_file(file: ConfigFile) -> str:
    """Write one configuration, keeping what is there and a backup of it; returns a sentence about
    it.

    Raises UsageError where the file can't be changed without losing something: JSON with comments,
    or a file of another format that already exists with other content.
    """
    path = file.path.resolve()  # through a link, with the backup beside what it leads to
    old = path.read_text(encoding="utf-8") if path.exists() else None
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
        value = json.loads(old) if old and old.strip() else ([] if file.merge_list_by else {})
    except ValueError as e:
        raise UsageError(
            f"{file.path} has comments or is not JSON, and writing it would lose them",
            hint="add the part printed without --write by hand",
        ) from e
    if file.merge_list_by:
        ours = file.merge
        names = {e[file.merge_list_by] for e in ours}
        kept = [
            e for e in value if not (isinstance(e, dict) and e.get(file.merge_list_by) in names)
        ]
        return [*kept, *ours]
    return deep_merge(value, file.merge)


def deep_merge(old: Any, new: Any) -> Any:
    """`new` put into `old`: objects are joined key by key, everything else is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{k: deep_merge(old.get(k), v) for k, v in new.items()}}


def run_checks(target: ClientTarget, probes: Iterable[Probe]) -> int:
    """Make the calls and print a line for each; returns how many failed."""
    import httpx

    from localllm.cli.editors.checks import checks

    failures = 0
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    with httpx.Client(
        base_url=target.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False
    ) as client:
        for check in (c for probe in probes for c in checks(probe, target.model)):
            started, said = time.monotonic(), ""
            try:
                check.run(client)
            except BackendError as e:
                said = e.message
            except httpx.HTTPError as e:
                said = str(e) or type(e).__name__
            failures += bool(said)
            seconds = time.monotonic() - started
            print(f"{'FAILED' if said else 'ok':<7} {check.what:<22} {seconds:5.1f} s  {said}")
    return failures
