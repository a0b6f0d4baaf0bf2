"""The root command: registers one function per command and turns every error into one message and an exit code."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Annotated, Any

import typer

from localllm import __version__
from localllm.cli import (
    bench,
    cache,
    catalog,
    chat,
    config,
    connect,
    device,
    doctor,
    engine_build,
    licences,
    models,
    pull,
    recommend,
    serve,
    service,
    setup,
    worker,
)
from localllm.errors import LocalLLMError

_EPILOG = (
    "Exit codes: 0 done, 1 internal error, 2 wrong usage, 3 not found, 4 bad model file, 5 does not fit, "
    "6 engine failed, 7 busy, 8 port in use, 9 download failed, 130 interrupted."
)

app = typer.Typer(
    name="localllm",
    help="Run large language models on the machine in front of you, as well as that machine physically can.",
    epilog=_EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(chat.chat)
# Summaries of their own, where a line of 80 columns would cut the first sentence.
app.command(short_help="Recommend models, with the memory and speed to expect.")(recommend.recommend)
app.command(short_help="Serve an OpenAI-compatible endpoint on this machine.")(serve.serve)
app.command(short_help="Download a model, resuming and verifying.")(pull.pull)
app.add_typer(models.app, name="models")
app.command("ls", help="List the models on this machine: `models list`.")(models.list_models)
app.add_typer(cache.app, name="cache")
app.add_typer(catalog.app, name="catalog")
app.command(short_help="Measure speed and memory, compare with a server.")(bench.bench)
app.command(short_help="Show usable memory, bandwidth and compute.")(device.device)
app.command(short_help="Check this machine and this installation.")(doctor.doctor)
app.command(short_help="Build the engine for this machine's accelerator.")(setup.setup)
app.command(short_help="Connect an editor or agent to the running server.")(connect.connect)
app.add_typer(service.app, name="service")
app.command(short_help="Lend this machine to a `localllm serve --with`.")(worker.worker)
app.add_typer(config.app, name="config")
app.command(short_help="Show the licences of libraries and models.")(licences.licences)


# Commands that end before there is anything worth looking for among what they made; and the chat, which looks once its screen
# is there (None: the chat, without its name).
_LOOKS_LATER = ("recommend", "chat", None)


def _version(value: bool) -> None:
    if value:
        print(f"localllm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    _version_flag: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Without a command: the chat on the best model at hand."""
    if context.invoked_subcommand not in _LOOKS_LATER:
        gc.enable()
    engine_build.activate(context.invoked_subcommand)
    if context.invoked_subcommand is None:
        chat.chat()


def report(error: LocalLLMError) -> int:
    """Print an error the way every command does (stderr, with its hint) and return its exit code."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {error.hint}", file=sys.stderr)
    return error.exit_code


def _asked(argv: list[str]) -> typer.Typer:
    """The root command with just the command that is asked for, since a parser is built for every one it has; with all of
    them where the first word is none of them (help, completion, a mistyped name)."""
    commands = [c for c in app.registered_commands if c.callback and argv[:1] == [c.name or c.callback.__name__]]
    groups = [group for group in app.registered_groups if argv[:1] == [group.name]]
    if not commands and not groups:
        return app
    lean = copy.copy(app)
    lean.registered_commands, lean.registered_groups = commands, groups
    return lean


def run(argv: list[str] | None = None) -> Any:
    """Entry point of the `localllm` script: no traceback reaches a user."""
    from localllm.settings import mistyped

    for said in mistyped():
        print(f"warning: {said}", file=sys.stderr)
    gc.disable()  # what a start makes stays: looking through it took a tenth of the time of `recommend`
    try:
        _asked(sys.argv[1:] if argv is None else argv)(args=argv)
    except LocalLLMError as e:
        sys.exit(report(e))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # `localllm … | head` closed our output: that is not an error of ours.
        sys.stderr.close()
        sys.exit(0)
    finally:
        gc.enable()


if __name__ == "__main__":
    run()
