"""`localllm connect EDITOR`: print, write or check the configuration of an editor or agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from localllm.cli.commands.shared import ServerKey, ServerUrl
from localllm.errors import LocalLLMError


def connect(
    editor: Annotated[
        str,
        typer.Argument(
            metavar="EDITOR", help="codex, claude, opencode, aider, continue, cline, zed, vscode, …"
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Which served model.")] = None,
    url: ServerUrl = None,
    api_key: ServerKey = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the configuration, keeping a backup.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Make that editor's calls to the running server.")
    ] = False,
) -> None:
    """Print (or write) the configuration that connects EDITOR to the running server."""
    from localllm.cli.chat.engines import address_and_key
    from localllm.cli.editors.configuring import print_steps, target_of
    from localllm.cli.editors.recipes import recipe_named
    from localllm.settings import Settings

    recipe_of = recipe_named(editor)
    base_url, key = address_and_key(url or f"127.0.0.1:{Settings().value('port')}", api_key)
    target = target_of(base_url, model, key)
    recipe = recipe_of(target, Path.home())
    print_steps(recipe, target.shell, write=write)
    if check:
        from localllm.cli.editors.checks import run_checks

        failures = run_checks(target, recipe.probes)
        if failures:
            raise LocalLLMError(f"{failures} of {recipe.name}'s calls failed")
