"""`localllm quality MODEL`: measure what a quant, a KV type or another engine loses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from localllm import paths
from localllm.cli.commands.shared import Json, Quiet, installed_names, print_json
from localllm.errors import UsageError
from localllm.plain_output import print_lines

_MAX_TEXT_BYTES = 16 << 20


def quality(
    ref: Annotated[
        str,
        typer.Argument(metavar="MODEL", autocompletion=installed_names, help="Model to measure."),
    ],
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="OTHER",
            autocompletion=installed_names,
            help="Reference (default: the most exact installed file of the same model).",
        ),
    ] = "",
    kv: Annotated[
        str,
        typer.Option("--kv", metavar="TYPE", help="Measure this KV type against f16: q8_0, q4_0 …"),
    ] = "",
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Text to measure on (default: a shipped one)."),
    ] = None,
    blocks: Annotated[
        int,
        typer.Option(
            "--blocks", min=0, metavar="N", help="Blocks (default: until the error is small)."
        ),
    ] = 0,
    block: Annotated[
        int, typer.Option("--block", min=64, max=8192, metavar="N", help="Tokens in a block.")
    ] = 512,
    tools: Annotated[
        bool,
        typer.Option("--tools", help="Compare how both templates write a conversation with tools."),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure a model's perplexity, and its KL divergence from a reference with error bars.

    The reference is another file of the model, another engine, or f16 KV. Blocks are spread over the
    text, so the first figures appear after one block. Figures are those of llama-perplexity. It also
    compares the files, and names faults such as another rope base, a missing BOS token, or a loss
    that is far above that of the quant elsewhere. Ctrl-C ends measuring and prints the figures so far.
    Exit code 4 if there is a fault.
    """
    from localllm.cli import model_quality
    from localllm.cli.template_differences import tool_differences
    from localllm.errors import ModelFileError
    from localllm.library.resolve import resolve
    from localllm.quants.verdict import more_exact_file

    if against and kv:
        raise UsageError(
            "--kv compares a model with itself, so it takes no --against", hint="leave one out"
        )
    model = resolve(ref)
    reference = None
    if against:
        reference = resolve(against)
    elif not kv:
        reference = more_exact_file(model)
    if tools and reference is None:
        raise UsageError(
            "--tools compares two templates, and no other file of the model is installed",
            hint="give one with --against",
        )
    request = model_quality.QualityRequest(model, reference, kv, _read_text(text), blocks, block)
    verdict = model_quality.measure_and_judge(request, quiet=quiet)
    body = model_quality.as_json(verdict)
    text_lines = model_quality.lines(verdict)
    if tools and reference is not None:
        body["tool_differences"] = tool_differences(model, reference)
        text_lines += _difference_lines(body["tool_differences"])
    if as_json:
        print_json(body)
    elif not quiet:
        print_lines(text_lines)
    else:
        print_lines([line for line in text_lines if line.startswith(model_quality.FAULT)])
    if verdict.faults:
        raise typer.Exit(ModelFileError.exit_code)


def _read_text(text: Path | None) -> str:
    if text is None:
        return ""
    try:
        return paths.file_bytes(text, _MAX_TEXT_BYTES).decode(errors="replace")
    except OSError as e:
        raise UsageError(
            f"{text} can't be read: {e.strerror}", hint="give a text file of at most 16 MiB"
        ) from e


def _difference_lines(differences: list[str]) -> list[str]:
    if not differences:
        return ["tools           both templates write the conversation alike"]
    return ["tools           the templates differ:", *(f"  {line}" for line in differences)]
