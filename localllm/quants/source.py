"""The source of a quant: whether it is exact enough, its importance matrix, and the result's
place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from localllm import paths
from localllm.errors import ModelFileError, UsageError
from localllm.library import names
from localllm.library.catalog import read_header
from localllm.library.types import LocalModel
from localllm_catalog import quants
from localllm_catalog.gguf import GgufHeader, TensorInfo
from localllm_catalog.names import without_quant

# F32, F16, BF16 and Q8_0 have at least this many bits a weight.
_EXACT_BITS = 8.0
# The value of --imatrix that turns off the use of a matrix next to the model.
NO_IMATRIX = "none"
# Memory for the program and llama.cpp's library.
_PROGRAM_BYTES = 200_000_000
# mlx-lm collects a shard of the result in memory before it writes it.
_MLX_SHARD_BYTES = 5 << 30
_MLX_BITS = re.compile(r"([2-8])bit|mxfp([48])|nvfp(4)")


@dataclass(frozen=True, slots=True)
class QuantSource:
    """A model to make a quant of.

    `type_name`: the format of most of its weights ("F16").
    `lowest_bits`: bits a weight of its coarsest matrix.
    `working_bytes`: memory that quantising takes.
    `header_bytes`: bytes of its keys, which the result has too.
    """

    local: LocalModel
    type_name: str
    lowest_bits: float
    working_bytes: int
    header_bytes: int = 0


def matrices(header: GgufHeader) -> list[TensorInfo]:
    """Return the tensors of a GGUF file that can be quantised: those with rows and columns."""
    return [tensor for tensor in header.tensors if len(tensor.shape) > 1]


def read_source(local: LocalModel) -> QuantSource:
    """Read the formats and sizes of the weights. Raises ModelFileError for an unreadable file."""
    if local.is_folder:
        bits = _mlx_bits(local.quant)
        working_bytes = min(local.size_bytes, _MLX_SHARD_BYTES) + _PROGRAM_BYTES
        return QuantSource(local, local.quant or "bf16", bits, working_bytes)
    header = read_header(local.path)
    n_weights: dict[str, int] = {}
    for tensor in matrices(header):
        n_weights[tensor.type] = n_weights.get(tensor.type, 0) + tensor.n_elements
    if not n_weights:
        raise ModelFileError(f"{local.path.name} has no weights to quantise")
    largest_bytes = max(tensor.n_bytes for tensor in header.tensors)
    return QuantSource(
        local,
        max(n_weights, key=n_weights.__getitem__),
        min(_gguf_bits(name) for name in n_weights),
        3 * largest_bytes + _PROGRAM_BYTES,
        header.data_start,
    )


def _gguf_bits(type_name: str) -> float:
    return quants.GGUF_TYPES[type_name].bits


def _mlx_bits(quant: str) -> float:
    match = _MLX_BITS.match(quant)
    if match is None:
        return 16.0
    return float(match[1] or match[2] or match[3])


def target_bits(quant: str) -> float:
    """Return the bits a weight of most tensors of a quant; 0 if it is unknown."""
    mixture = quants.MIXTURES.get(quant.upper())
    if mixture is not None:
        return _gguf_bits(mixture.base)
    if quant.upper() in quants.GGUF_TYPES:
        return _gguf_bits(quant.upper())
    match = _MLX_BITS.match(quant.lower())
    if match is None:
        return 0.0
    return _mlx_bits(quant.lower())


def check_exact(source: QuantSource, quant: str) -> None:
    """Raise UsageError if the quant would be worse than one that is made from the original."""
    name = source.local.path.name
    if source.lowest_bits < _EXACT_BITS:
        raise UsageError(
            f"{name} is itself a quant with only {source.lowest_bits:.3g} bits a weight "
            f"({source.type_name}): a quant of it has the errors of both",
            hint="make it from a file in F32, F16, BF16 or Q8_0; --anyway makes it regardless",
        )
    if target_bits(quant) >= source.lowest_bits:
        raise UsageError(
            f"{quant} is not smaller than {name} ({source.type_name}), and can't be more exact",
            hint="choose a smaller quant; --anyway makes it regardless",
        )


def imatrix_for(local: LocalModel, chosen: str) -> Path | None:
    """Return the importance matrix to use: `chosen`, or the only one next to the model.

    Raises UsageError if `chosen` is no file, or if there are several.
    """
    if chosen == NO_IMATRIX:
        return None
    if chosen:
        path = Path(chosen).expanduser()
        if not path.is_file():
            raise UsageError(f"there is no file {chosen!r}", hint="check the path of --imatrix")
        return path
    matrices_here = [file for kind, file in local.companions if kind == "imatrix"]
    if len(matrices_here) > 1:
        file_names = ", ".join(file.name for file in matrices_here)
        raise UsageError(
            f"{len(matrices_here)} importance matrices are next to {local.path.name}: {file_names}",
            hint=f"choose one with --imatrix, or --imatrix {NO_IMATRIX}",
        )
    if matrices_here:
        return matrices_here[0]
    return None


def target_path(local: LocalModel, quant: str, output: Path | None) -> Path:
    """Return the path of the result: `output`, or a file or folder among the quants made here.

    Raises UsageError if it exists.
    """
    model_name = without_quant(local.name)
    if local.path.suffix.lower() == ".gguf":
        model_name = without_quant(names.stem_of(local.path.name))
    model_name = (
        "".join("-" if character in '/\\:<>|?*"' else character for character in model_name).strip(
            ". "
        )
        or "model"
    )
    file_name = f"{model_name}-{quant}"
    if not local.is_folder:
        file_name += ".gguf"
    target = paths.quants_dir() / model_name / file_name
    if output is not None:
        target = output.expanduser()
        if target.is_dir():
            target = target / file_name
        elif not local.is_folder and target.suffix.lower() != ".gguf":
            raise UsageError(
                f"--output {output} is neither a folder nor a name that ends in .gguf",
                hint=f"give a folder that exists, or a name such as {file_name}",
            )
    if target.exists():
        raise UsageError(
            f"{target} exists", hint="remove it first, or give another path with --output"
        )
    return target
