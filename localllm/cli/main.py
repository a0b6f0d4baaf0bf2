"""The root command: registers one function per command, and turns errors into messages and exit
codes."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from localllm import __version__
from localllm.cli.familiar_commands import translated
from localllm.errors import LocalLLMError, UsageError

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
_HELP = ("-h", "--help")
_COMPLETING = "_LOCALLLM_COMPLETE"  # set by the shell's completion

# Commands that don't enable garbage collection at the start. `recommend` ends before it would pay
# off. The server and the chat (None: the chat without its name) enable it after starting.
_LOOKS_LATER = ("recommend", "serve", "chat", None)


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
    if context.invoked_subcommand not in _LOOKS_LATER:
        gc.enable()
    from localllm.cli import engine_builds

    engine_builds.activate(context.invoked_subcommand)
    if context.invoked_subcommand is None:
        from localllm.cli.commands import chat

        chat.chat()


def report(error: LocalLLMError) -> int:
    """Print an error as all commands do (on stderr, with its hint). Returns its exit code."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {error.hint}", file=sys.stderr)
    return error.exit_code


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
        context_settings={"help_option_names": list(_HELP)},
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


def run(argv: list[str] | None = None) -> Any:
    """Entry point of the `localllm` script.

    Users get no tracebacks, and the terminal gets no control characters.
    """
    from localllm.plain_output import give_up_stdout, only_plain

    code: Any = 0
    typed = sys.argv[1:] if argv is None else argv
    # click's help texts have at least 50 columns.
    with only_plain(wraps_stdout=any(word in _HELP for word in typed)):
        try:
            try:
                _run(argv)
            except SystemExit as left:
                code = left.code
            sys.stdout.flush()
        except BrokenPipeError:
            # `localllm … | head` closed our output. That is no error.
            sys.stderr.close()
        except OSError as e:
            give_up_stdout()
            # Errors of files that commands open include the file's name. Errors of our own streams
            # don't.
            error = LocalLLMError(
                f"{e.filename or 'the output'} can't be used: {e.strerror or e}",
                hint="check its permissions and the free space of its disk",
            )
            code = report(error)
    sys.exit(code)


def _only_command(typed: list[str]) -> str | None:
    """Return the name of the one command that must be built; None if all must be."""
    if typed:
        return typed[0]
    if _COMPLETING in os.environ:
        return None
    return "chat"  # the default command


def _run(argv: list[str] | None) -> None:
    from localllm.plain_output import is_text
    from localllm.settings import mistyped

    for warning in mistyped():
        print(f"warning: {warning}", file=sys.stderr)
    # Objects made at startup live until the end. Garbage collection over them took a tenth of the
    # time of `recommend`.
    gc.disable()
    typed = sys.argv[1:] if argv is None else argv
    try:
        ours = translated(typed)
        if ours != typed:
            argv = ours
        command_line(_only_command(ours))(args=argv)
    except LocalLLMError as e:
        sys.exit(report(e))
    except KeyboardInterrupt:
        sys.exit(130)
    except UnicodeEncodeError:
        if all(is_text(word) for word in typed):
            raise
        warning = "the command line is not valid UTF-8"
        sys.exit(report(UsageError(warning, hint="type it in UTF-8, or pipe it in")))
    finally:
        gc.enable()


if __name__ == "__main__":
    run()
