"""`localllm run AGENT`: start a coding agent on a local server with settings for that process only.

The server is a running one or is started for the agent.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm import paths
from localllm.cli.commands.shared import ModelName, ServerKey, ServerUrl
from localllm.cli.setting_options import with_setting_options
from localllm.errors import LocalLLMError, NotFoundError, UsageError
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.cli.editors.recipes import ClientRecipe

# Private folders in the home folder that an agent has no need to read.
_SECRET_PATHS = (
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".kube",
    ".docker",
    ".config/gcloud",
    ".password-store",
    ".netrc",
)


@with_setting_options("context", "lora")
def run(
    agent: Annotated[
        str,
        typer.Argument(metavar="AGENT", help="codex, claude, opencode, aider, qwen, pi, goose, …"),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGUMENT]...", help="Arguments for the agent.", show_default=False
        ),
    ] = None,
    model: ModelName = None,
    *,
    settings: Settings,
    url: ServerUrl = None,
    api_key: ServerKey = None,
    sandbox: Annotated[
        bool,
        typer.Option(
            "--sandbox",
            help="Restrict writes to this folder (bubblewrap, or macOS' sandbox-exec).",
        ),
    ] = False,
) -> None:
    """Start AGENT on a model of this machine, and stop the server afterwards if it was started
    here.

    If a `localllm serve` on this machine has the model, that server answers. Otherwise the model is
    loaded while the agent runs. The agent's own configuration is not changed: its settings are
    environment variables, arguments and files in a temporary folder.
    """

    from localllm.cli.chat import engines
    from localllm.cli.editors.configuring import target_of, warn
    from localllm.cli.editors.recipes import ClientTarget, recipe_named

    # Report all errors before a model is loaded.
    recipe_of = recipe_named(agent, to_run=True)
    process = recipe_of(ClientTarget("http://127.0.0.1", "model", 4096), Path.home()).run
    if process is None:
        raise UsageError(
            f"localllm can't start {agent}, because it is not a command-line program",
            hint=f"`localllm connect {agent}` shows how to set it up",
        )
    program = shutil.which(process.command[0])
    if program is None:
        raise NotFoundError(
            f"{process.command[0]} is not installed here",
            hint=f"install it, then run {agent} again",
        )
    folder = Path.cwd()
    if sandbox:
        _check_sandbox(folder)
    with ExitStack() as stack:
        request = engines.EngineRequest(model, settings, url, api_key)
        engine = engines.engine_for(stack, request, None, at_once=False)
        if engine.unix_socket:
            raise UsageError(
                "the running server listens on a Unix socket, which agents can't use",
                hint="add --url",
            )
        temporary_folder = tempfile.TemporaryDirectory(prefix="localllm-run-")
        home = Path(stack.enter_context(temporary_folder)).resolve()
        target = target_of(engine.base_url, engine.model, engine.api_key)
        recipe = recipe_of(target, home)
        assert recipe.run is not None
        warn(recipe)
        command = [program, *recipe.run.command[1:], *(arguments or ())]
        environment = {**recipe.environment, **recipe.run.environment}
        if sandbox:
            command = sandboxed(command, folder, home)
            environment |= {"HOME": str(home), "TMPDIR": str(home)}
        recipe = _write_files(recipe, home)
        _print_start(recipe, target.model, engine.base_url, environment)
        if sandbox:
            print(
                f"  sandbox: writes only in {folder}; its own empty home; network access is open",
                file=sys.stderr,
                flush=True,
            )
        exit_code = _run_agent(command, environment, process.without)
    raise typer.Exit(exit_code)


def _write_files(recipe: ClientRecipe, home: Path) -> ClientRecipe:
    """Write the files of the recipe that the program's command or environment refers to.

    Returns the recipe with only those files.
    """

    assert recipe.run is not None
    mentioned = [*recipe.run.command, *recipe.run.environment.values()]
    files = tuple(f for f in recipe.files if {str(f.path), str(f.path.parent)} & set(mentioned))
    for file in files:
        assert file.path.is_relative_to(home)
        file.path.parent.mkdir(parents=True, exist_ok=True)
        paths.write_private(file.path, file.shown())
    return replace(recipe, files=files)


def _print_start(
    recipe: ClientRecipe, model: str, base_url: str, environment: Mapping[str, str]
) -> None:
    assert recipe.run is not None
    lines = [f"{recipe.name} on {model} at {base_url}, for this process only"]
    if environment:
        lines.append(f"  variables: {', '.join(environment)}")
    if recipe.run.without:
        lines.append(f"  without: {', '.join(recipe.run.without)}")
    arguments = shlex.join(recipe.run.command[1:])
    if arguments:
        lines.append(f"  arguments: {arguments}")
    for file in recipe.files:
        lines.append(f"  file: {file.path} (removed afterwards)")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _ignore_signal(_signal: int, _frame: object) -> None:
    """Ignore Ctrl-C here. The agent would inherit SIG_IGN, but not a handler."""


def _run_agent(
    command: Sequence[str], environment: Mapping[str, str], removed: Sequence[str]
) -> int:
    """Run `command` until it ends and return its exit code. The agent handles Ctrl-C."""

    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    previous_handler = signal.signal(signal.SIGINT, _ignore_signal)
    try:
        exit_code = subprocess.run(
            command, env={**inherited, **environment}, check=False
        ).returncode
    except OSError as e:
        raise LocalLLMError(
            f"{command[0]} can't be started: {e.strerror}",
            hint="reinstall it: its installation may be incomplete",
        ) from e
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    if exit_code >= 0:
        return exit_code
    return 128 - exit_code


def _check_sandbox(folder: Path) -> None:
    """Raise UsageError if there is no sandbox, or if it would allow writing everywhere."""

    if not (shutil.which("bwrap") or shutil.which("sandbox-exec")):
        raise UsageError(
            "no sandbox program is installed",
            hint="install bubblewrap (Linux); macOS has sandbox-exec",
        )
    if folder.resolve() in (Path.home().resolve(), *Path.home().resolve().parents):
        raise UsageError(
            f"{folder} contains your home folder, so the agent could write to all of it",
            hint="start it in the folder of a project",
        )


def sandboxed(command: Sequence[str], folder: Path, home: Path) -> list[str]:
    """Wrap `command` in bubblewrap or sandbox-exec.

    It can't read folders with keys and passwords, and writes only below `folder` and `home`.
    """

    secret_paths = [Path.home() / name for name in _SECRET_PATHS]
    hidden = [path for path in secret_paths if path.exists()]
    bwrap = shutil.which("bwrap")
    if bwrap is not None:
        return [bwrap, *_bwrap_options(folder, home, hidden), "--", *command]
    sandbox_exec = shutil.which("sandbox-exec") or "sandbox-exec"
    return [sandbox_exec, "-p", _sandbox_profile(folder, home, hidden), *command]


def _bwrap_options(folder: Path, home: Path, hidden: Sequence[Path]) -> list[str]:
    options = [
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--tmpfs",
        "/tmp",
        "--unshare-pid",
    ]
    for path in hidden:
        if path.is_dir():
            options += ["--tmpfs", str(path)]
        else:
            options += ["--ro-bind", "/dev/null", str(path)]
    for path in (folder, home):
        options += ["--bind", str(path), str(path)]
    return [*options, "--chdir", str(folder), "--die-with-parent"]


def _sandbox_profile(folder: Path, home: Path, hidden: Sequence[Path]) -> str:
    """Return the rules for macOS' sandbox-exec."""
    writable = [_subpath_rule(path.resolve()) for path in (folder, home, Path("/dev"))]
    rules = f"(allow default)(deny file-write*)(allow file-write* {' '.join(writable)})"
    for path in hidden:
        rules += f"(deny file-read* {_subpath_rule(path)})"
    return f"(version 1){rules}"


def _subpath_rule(path: Path) -> str:
    return f"(subpath {json.dumps(str(path))})"
