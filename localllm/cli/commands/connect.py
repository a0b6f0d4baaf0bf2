"""`localllm connect EDITOR`: print, write or check the configuration of an editor or agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from localllm.cli.commands.shared import ServerKey, ServerUrl
from localllm.errors import LocalLLMError
from localllm.plain_output import print_lines


def connect(
    editor: Annotated[
        str | None,
        typer.Argument(
            metavar="EDITOR", help="codex, claude, opencode, aider, continue, cline, zed, vscode, …"
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Served model to use.")] = None,
    url: ServerUrl = None,
    api_key: ServerKey = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the configuration, keeping a backup.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Make that editor's calls to the running server.")
    ] = False,
) -> None:
    """Print (or write) the configuration that connects EDITOR to the running server.

    Without EDITOR, the known editors and agents are listed.
    """
    from localllm.cli.chat.engines import address_and_key, own_address
    from localllm.cli.editors.configuring import print_steps, target_of
    from localllm.cli.editors.recipes import RECIPES, recipe_named

    if editor is None:
        print_lines([*RECIPES, "", "for example: localllm connect opencode --write"])
        return
    recipe_of = recipe_named(editor)
    base_url, key = address_and_key(url or own_address(), api_key)
    target = target_of(base_url, model, key)
    recipe = recipe_of(target, Path.home())
    print_steps(recipe, target.shell, write=write)
    if check:
        from localllm.cli.editors.checks import run_checks

        failures = run_checks(target, recipe.probes)
        if failures:
            raise LocalLLMError(f"{failures} of {recipe.name}'s calls failed")
