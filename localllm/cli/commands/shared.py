"""Options, output and prompts that commands share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from localllm.errors import UsageError
from localllm.plain_output import ascii_json, plain


def installed_names(typed: str) -> list[str]:
    """Complete `typed` with the names of installed models, for the shell."""
    from localllm.library import store

    try:
        return sorted({local.name for local in store.scan() if local.name.startswith(typed)})
    except OSError:
        return []


ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        autocompletion=installed_names,
        help="Model: a name, a hub repo or a path (default: the best installed one).",
    ),
]
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="Use the server at this address (with /v1 or without)."
    ),
]
ServerKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", help="Key of that server (or LOCALLLM_API_KEY)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def calls_command(context: typer.Context, *, as_json: bool) -> bool:
    """Return whether the command group of `context` was called with a command.

    Raises UsageError for --json before that command, which would have no effect.
    """
    command = context.invoked_subcommand
    if command is None:
        return False
    if as_json:
        group = context.info_name
        raise UsageError(
            f"--json belongs after the command {command}",
            hint=f"localllm {group} {command} --json",
            param="--json",
        )
    return True


def table(rows: Sequence[tuple[str, ...]], right_aligned: tuple[int, ...] = ()) -> str:
    """Format rows with aligned columns. Columns numbered in `right_aligned` are right-aligned."""

    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        texts = [plain(cell) for cell in cells]
        width = max(map(len, texts))
        align = ">" if number in right_aligned else "<"
        columns.append([f"{text:{align}{width}}" for text in texts])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def is_at_terminal() -> bool:
    """True if input and output are a terminal, including stderr, because screens are drawn on it
    too."""
    return all(
        stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)
    )


def print_json(body: Any) -> None:
    print(ascii_json(body))


def confirmed(question: str) -> bool:
    """Ask for confirmation on the terminal. Without one, raise UsageError that suggests --yes."""

    if not sys.stdin.isatty():
        raise UsageError("this removes files, and confirmation needs a terminal", hint="add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
