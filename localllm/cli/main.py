"""The root command: registers one function per command and turns every error into one message and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from localllm import __version__
from localllm.cli import bench, chat, config, connect, device, doctor, models, pull, recommend, serve, service
from localllm.errors import LocalLLMError

_EPILOG = (
    "Exit codes: 0 done, 1 internal error, 2 wrong usage, 3 not found, 4 bad model file, 5 does not fit, "
    "6 engine failed, 7 busy, 8 port in use, 9 download failed, 130 interrupted."
)

app = typer.Typer(
    name="localllm",
    help="Run large language models on the machine in front of you, as well as that machine physically can.",
    epilog=_EPILOG,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(chat.chat)
app.command()(recommend.recommend)
app.command()(serve.serve)
app.command()(pull.pull)
app.add_typer(models.app, name="models")
app.command()(bench.bench)
app.command()(device.device)
app.command()(doctor.doctor)
app.command()(connect.connect)
app.command()(service.service)
app.command()(config.config)


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
    if context.invoked_subcommand is None:
        chat.chat()


def report(error: LocalLLMError) -> int:
    """Print an error the way every command does (stderr, with its hint) and return its exit code."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {error.hint}", file=sys.stderr)
    return error.exit_code


def run(argv: list[str] | None = None) -> Any:
    """Entry point of the `localllm` script: no traceback reaches a user."""
    try:
        app(args=argv)
    except LocalLLMError as e:
        sys.exit(report(e))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # `localllm … | head` closed our output: that is not an error of ours.
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    run()
