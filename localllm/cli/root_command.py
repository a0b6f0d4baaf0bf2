"""The root command: one function per command, registered by name."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Annotated

import typer

from localllm import __version__
from localllm.cli.familiar_commands import HELP

_EPILOG = (
    "Exit codes: 0 done, 1 internal error, 2 wrong usage, 3 not found, 4 bad model file, "
    "5 does not fit, 6 engine failed, 7 busy, 8 port in use, 9 download failed, 130 interrupted."
)

# By name: the function or command group under localllm.cli.commands, and a short summary if the
# first sentence of its help exceeds a line of 80 columns.
_COMMANDS = {
    "chat": ("chat:chat", None),
    "recommend": ("recommend:recommend", "Recommend models, with the memory and speed to expect."),
    "serve": ("serve:serve", "Serve an OpenAI-compatible endpoint on this machine."),
    "pull": ("pull:pull", "Download a model, resuming and verifying."),
    "models": ("models:app", None),
    "ls": ("models:list_models", "List the models on this machine: `models list`."),
    "cache": ("cache:app", None),
    "catalog": ("catalog:app", None),
    "quantize": (
        "quantize:quantize",
        "Make a quant of a model: GGUF with llama.cpp, MLX with mlx-lm.",
    ),
    "quality": (
        "quality:quality",
        "Measure what a quant, a KV type or another engine loses.",
    ),
    "bench": ("bench:bench", "Measure speed and memory, compare with a server."),
    "device": ("device:device", "Show usable memory, bandwidth and compute."),
    "doctor": ("doctor:doctor", "Check this machine and this installation."),
    "setup": ("setup:setup", "Build the engine for this machine's accelerator."),
    "connect": ("connect:connect", "Connect an editor or agent to the running server."),
    "run": ("run:run", "Start an agent on a model of this machine."),
    "service": ("service:app", None),
    "worker": (
        "worker:worker",
        "Run a part of a model for `localllm serve --with` on another machine.",
    ),
    "config": ("config:app", None),
    "licences": ("licences:licences", "Show the licences of libraries and models."),
}

# Commands that don't enable garbage collection at the start. `recommend` ends before it would pay
# off. The server and the chat (None: the chat without its name) enable it after starting.
_ENABLES_GC_LATER = ("recommend", "serve", "chat", None)


def _version(value: bool) -> None:
    if value:
        print(f"localllm {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    _version_flag: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Start the chat with the best installed model if no command is given."""
    if context.invoked_subcommand not in _ENABLES_GC_LATER:
        gc.enable()
    # `serve` starts a worker of the build before this code is imported.
    if context.invoked_subcommand != "serve":
        from localllm.cli import engine_builds

        engine_builds.activate(context.invoked_subcommand)
    if context.invoked_subcommand is None:
        from localllm.cli.commands import chat

        chat.chat()


def command_line(only: str | None = None) -> typer.Typer:
    """Build the root command with all of its commands, for help, completion and mistyped names.

    If `only` names a command, just that one is built. Importing the others and building their
    parsers takes longer than many commands.
    """
    app = typer.Typer(
        name="localllm",
        help="Run large language models on your own machine, as fast as its hardware allows.",
        epilog=_EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": list(HELP)},
    )
    app.callback(invoke_without_command=True)(_root)
    names = list(_COMMANDS)
    if only in _COMMANDS:
        names = [only]
    for name in names:
        place, summary = _COMMANDS[name]
        module, _, attribute = place.partition(":")
        command = getattr(import_module(f"localllm.cli.commands.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, short_help=summary)(command)
    return app
