"""`localllm quantize MODEL --to QUANT`: make a quant of a model. Progress goes to stderr, the path
to stdout."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.commands.shared import Json, Quiet, installed_names, print_json

if TYPE_CHECKING:
    from localllm.library.types import LocalModel
    from localllm.quants.larger_tensors import LargerTensors
    from localllm.quants.make import QuantRequest

# A list of more kinds of tensors is no help.
_MAX_LISTED = 6


def quantize(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=installed_names,
            help="Model in F32, F16, BF16 or Q8_0: a name, a hub repo or a path.",
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="QUANT", help="Q4_K_M, Q5_K_M, Q6_K …; MLX: 4bit, 6bit …")
    ],
    imatrix: Annotated[
        str,
        typer.Option(
            "--imatrix",
            metavar="FILE",
            help="Importance matrix of this model (default: the one next to it; none: without).",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File or folder (default: localllm's own folder).",
        ),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Start from a small quant, or write a larger one.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make a quant of a model on this disk: GGUF files with llama.cpp, MLX folders with mlx-lm.

    It reads and writes the file in parts, so the model may be larger than memory. Ctrl-C leaves no
    files. The result is listed and can be run at once. `localllm quality` measures what it lost.
    """
    from localllm.cli.commands.pull import ProgressLine
    from localllm.library.resolve import resolve
    from localllm.quants.make import QuantRequest, make_quant
    from localllm.quants.source import check_exact, imatrix_for, read_source, target_path

    local = resolve(ref)
    source = read_source(local)
    quant = to.lower() if local.is_folder else to.upper()
    if not anyway:
        check_exact(source, quant)
    request = QuantRequest(
        source, quant, target_path(local, quant, output), imatrix_for(local, imatrix)
    )
    if not quiet:
        _print_matrix(request)
    meter = ProgressLine(io.StringIO() if quiet else sys.stderr)
    try:
        seconds = make_quant(request, meter)
    except KeyboardInterrupt:
        meter.close()
        if not quiet:
            print("stopped; nothing was written", file=sys.stderr)
        raise
    finally:
        meter.close()
    _print_result(request, seconds, as_json=as_json, quiet=quiet)


def _print_matrix(request: QuantRequest) -> None:
    if request.imatrix is not None:
        print(f"importance matrix: {request.imatrix}", file=sys.stderr)


def _print_result(request: QuantRequest, seconds: float, *, as_json: bool, quiet: bool) -> None:
    from localllm.cli.commands.models_view import as_row
    from localllm.library import store
    from localllm.library.resolve import by_path

    local = by_path(str(request.target))
    assert local is not None
    listed = [model for model in store.scan() if model.path.resolve() == local.path.resolve()]
    if listed:
        local = listed[0]
    larger_kinds = _larger(request, local)
    if as_json:
        imatrix = None if request.imatrix is None else str(request.imatrix)
        print_json(
            {
                **as_row(local),
                "source": str(request.source.local.path),
                "imatrix": imatrix,
                "seconds": round(seconds, 3),
                "larger_tensors": [asdict(kind) for kind in larger_kinds],
            }
        )
        return
    if not quiet:
        _print_facts(request, local, larger_kinds, seconds, is_listed=bool(listed))
    print(local.path)


def _larger(request: QuantRequest, local: LocalModel) -> list[LargerTensors]:
    from localllm.library.catalog import read_header
    from localllm.quants.larger_tensors import larger_tensors

    if local.is_folder:
        return []
    return larger_tensors(read_header(local.path), request.quant)


def _print_facts(
    request: QuantRequest,
    local: LocalModel,
    larger_kinds: list[LargerTensors],
    seconds: float,
    *,
    is_listed: bool,
) -> None:
    """Print the size, the tensors that stay larger, and how to run the quant."""
    from localllm.formatting import byte_size, span

    source_size = byte_size(request.source.local.size_bytes)
    sizes = f"{byte_size(local.size_bytes)} instead of {source_size}, in {span(seconds)}"
    print(f"{local.name} {local.quant}: {sizes}", file=sys.stderr)
    if larger_kinds:
        kind_texts = [kind.text for kind in larger_kinds[:_MAX_LISTED]]
        if len(larger_kinds) > _MAX_LISTED:
            kind_texts.append(f"{len(larger_kinds) - _MAX_LISTED} more kinds (--json lists all)")
        print(f"larger than {request.quant}: {'; '.join(kind_texts)}", file=sys.stderr)
    name = local.name if is_listed else str(local.path)
    print(f"run it: `localllm chat -m {name}`", file=sys.stderr)
    if not is_listed:
        print(f"to list it: `localllm models adopt {local.path.parent}`", file=sys.stderr)
