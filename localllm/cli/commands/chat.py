"""`localllm chat`: chat in this terminal, or print one answer on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from localllm.cli.commands.shared import (
    ServerKey,
    ServerUrl,
    installed_names,
    is_at_terminal,
)
from localllm.cli.setting_options import with_flags, with_setting_options
from localllm.errors import UsageError
from localllm.plain_output import TerminalLine, is_text
from localllm.setting_table import LOADING
from localllm.settings import Settings

# The question if there is neither a terminal nor a prompt (`localllm chat </dev/null`). It shows
# that the setup works.
FIRST_QUESTION = "Say hello and tell me in one sentence what you can help with."


@with_setting_options(*with_flags(LOADING), "chat_screen_reader")
def chat(
    prompt: Annotated[str | None, typer.Argument(help="Answer this on stdout and exit.")] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            autocompletion=installed_names,
            help="Model: a name, a hub repo or a path (default: the best installed one). "
            "Two compare their answers.",
        ),
    ] = None,
    attach: Annotated[
        list[Path] | None,
        typer.Option(
            "--attach",
            metavar="PATH",
            help="Attach a text, an image, a sound or a folder's texts (repeatable).",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Chat line by line, without the full screen.")
    ] = False,
    inline: Annotated[
        bool,
        typer.Option(
            "--inline", help="Chat in the terminal's own scrollback, without the full screen."
        ),
    ] = False,
    continue_: Annotated[
        bool, typer.Option("--continue", help="Continue the last conversation.")
    ] = False,
    *,
    settings: Settings,
    url: ServerUrl = None,
    api_key: ServerKey = None,
    own: Annotated[
        bool,
        typer.Option(
            "--own", help="Load the model in this process, even if a running server has it."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy (default: the model's own).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Make sampling repeatable.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.")] = None,
) -> None:
    """Chat in the terminal. With a PROMPT or without a terminal: stream one answer to stdout and
    exit.

    If a `localllm serve` on this machine has the model or may load it, that server answers.
    Otherwise the model is loaded here. Piped text becomes part of the question. Conversations are
    stored on this machine. One answer on stdout is only stored with --continue.
    """

    from localllm.cli.chat.engines import EngineRequest
    from localllm_tui.control.attachments import check_fits_context
    from localllm_tui.control.terminal import ask_background

    # Report all errors in the options before a model is loaded.
    _check_prompt(prompt, has_files=bool(attach))
    model, other = _model_and_other(models or (), continues=continue_)
    attached = _read_attachments(attach or ())
    check_fits_context(attached, settings.value("context") or None)
    question = None
    if prompt is not None or not is_at_terminal():
        question = _question(prompt, bool(attached))
    plain = _needs_plain_text(settings) or plain
    sampling = _sampling(temperature, seed, max_tokens)
    engine_request = EngineRequest(model, settings, url, api_key, own)
    try:
        with ExitStack() as stack:
            background = None
            if question is None and not (plain or inline):
                background = ask_background()
                stack.callback(background.answer)
            # The terminal answers while the chat's code is imported.
            from localllm.cli.chat import begin

            invocation = begin.ChatInvocation(
                engine_request, attached, continue_, system, sampling, other
            )
            if question is None:
                begin.start_conversation(stack, invocation, background, inline=inline and not plain)
            else:
                begin.answer(stack, invocation, question)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _check_prompt(prompt: str | None, *, has_files: bool) -> None:
    """Raise UsageError if a question was given and is empty."""
    if prompt is not None and not prompt.strip() and not has_files:
        raise UsageError(
            "the question is empty", hint='ask something: localllm chat "What is a lighthouse?"'
        )


def _model_and_other(models: Sequence[str], *, continues: bool) -> tuple[str | None, str]:
    """Return the model that answers, and the one whose answers are compared with it, or "".

    Raises UsageError for more than two.
    """
    if len(models) > 2:
        raise UsageError(f"-m names {len(models)} models", hint="two answers can be compared")
    if len(models) == 2 and continues:
        raise UsageError(
            "--continue and two models can't be combined",
            hint="continue with one model, and use /retry MODEL and /compare in the chat",
        )
    if not models:
        return None, ""
    return models[0], "".join(models[1:])


def _needs_plain_text(settings: Settings) -> bool:
    """True for a screen reader, and for a terminal that cannot draw a screen."""
    TerminalLine.adds_lines = bool(settings.value("chat_screen_reader"))
    return TerminalLine.adds_lines or os.environ.get("TERM") == "dumb"


def _sampling(
    temperature: float | None, seed: int | None, max_tokens: int | None
) -> dict[str, float | int | str]:
    """Return the given options as fields of a request."""
    fields: dict[str, float | int | str] = {}
    if temperature is not None:
        fields["temperature"] = temperature
    if seed is not None:
        fields["seed"] = seed
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    return fields


def _read_attachments(paths: Iterable[Path]) -> list[tuple[str, str]]:
    texts = []
    for path in paths:
        texts += _read_attachment(path)
    return texts


def _read_attachment(path: Path) -> list[tuple[str, str]]:
    """Return (name, text) of a file, or of each text file in a folder."""
    from localllm_tui.control.attachments import read_files
    from localllm_tui.control.terminal import one_line

    texts, n_skipped = read_files(path)
    if n_skipped:
        n_files = len(texts) + n_skipped
        typer.echo(
            f"{one_line(str(path))}: {n_skipped} of {n_files} "
            "files are skipped, because they are not text",
            err=True,
        )
    return texts


def _question(prompt: str | None, attached: bool) -> str:
    """Return the question: piped text, followed by the prompt of the command line."""

    if prompt is None:
        question = _piped_text(may_ask=True)
    elif is_text(prompt):
        question = f"{_piped_text(may_ask=False)}\n\n{prompt.strip()}".strip()
    else:
        raise UsageError("the question is not valid UTF-8", hint="type it in UTF-8")
    if question:
        return question
    if attached:
        raise UsageError(
            "--attach needs a question",
            hint='for example: localllm chat --attach notes.txt "Summarise this"',
        )
    print(f"no question was given, so the model is asked: {FIRST_QUESTION}", file=sys.stderr)
    return FIRST_QUESTION


def _piped_text(*, may_ask: bool) -> str:
    """Return the piped text. `may_ask`: also read the question from a terminal."""
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        if not may_ask:
            return ""
        print("type the question and end it with Ctrl-D", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError as e:
        raise UsageError(
            "the standard input is not UTF-8 text", hint="convert it first, for example with iconv"
        ) from e
