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
    from localllm.quants.source import check_exact, imatrix_for, read_source, target_of

    local = resolve(ref)
    source = read_source(local)
    quant = to.lower() if local.is_folder else to.upper()
    if not anyway:
        check_exact(source, quant)
    wish = QuantRequest(source, quant, target_of(local, quant, output), imatrix_for(local, imatrix))
    if not quiet:
        _print_matrix(wish)
    meter = ProgressLine(io.StringIO() if quiet else sys.stderr)
    try:
        seconds = make_quant(wish, meter)
    except KeyboardInterrupt:
        meter.close()
        if not quiet:
            print("stopped; nothing was written", file=sys.stderr)
        raise
    finally:
        meter.close()
    _print_result(wish, seconds, as_json=as_json, quiet=quiet)


def _print_matrix(wish: QuantRequest) -> None:
    if wish.imatrix is not None:
        print(f"importance matrix: {wish.imatrix}", file=sys.stderr)


def _print_result(wish: QuantRequest, seconds: float, *, as_json: bool, quiet: bool) -> None:
    from localllm.cli.commands.models_view import as_row
    from localllm.library import store
    from localllm.library.resolve import by_path

    found = by_path(str(wish.target))
    assert found is not None
    listed = [model for model in store.scan() if model.path.resolve() == found.path.resolve()]
    if listed:
        found = listed[0]
    larger = _larger(wish, found)
    if as_json:
        imatrix = None if wish.imatrix is None else str(wish.imatrix)
        print_json(
            {
                **as_row(found),
                "source": str(wish.source.local.path),
                "imatrix": imatrix,
                "seconds": round(seconds, 3),
                "larger_tensors": [asdict(kind) for kind in larger],
            }
        )
        return
    if not quiet:
        _print_facts(wish, found, larger, seconds, is_listed=bool(listed))
    print(found.path)


def _larger(wish: QuantRequest, found: LocalModel) -> list[LargerTensors]:
    from localllm.library.catalog import read_header
    from localllm.quants.larger_tensors import larger_tensors

    if found.is_folder:
        return []
    return larger_tensors(read_header(found.path), wish.quant)


def _print_facts(
    wish: QuantRequest,
    found: LocalModel,
    larger: list[LargerTensors],
    seconds: float,
    *,
    is_listed: bool,
) -> None:
    """Print the size, the tensors that stay larger, and how to run the quant."""
    from localllm.formatting import byte_size, span

    before = byte_size(wish.source.local.size_bytes)
    sizes = f"{byte_size(found.size_bytes)} instead of {before}, in {span(seconds)}"
    print(f"{found.name} {found.quant}: {sizes}", file=sys.stderr)
    if larger:
        texts = [kind.text for kind in larger[:_MAX_LISTED]]
        if len(larger) > _MAX_LISTED:
            texts.append(f"{len(larger) - _MAX_LISTED} more kinds (--json lists all)")
        print(f"larger than {wish.quant}: {'; '.join(texts)}", file=sys.stderr)
    name = found.name if is_listed else str(found.path)
    print(f"run it: `localllm chat -m {name}`", file=sys.stderr)
    if not is_listed:
        print(f"to list it: `localllm models adopt {found.path.parent}`", file=sys.stderr)
