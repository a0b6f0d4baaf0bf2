"""Copies of a GGUF file with deliberate faults: other metadata, other tensors or another order of
layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.quants import quantize

from models.gguf_reader import GGUFReader


def write_altered(
    source: Path,
    target: Path,
    *,
    fields: Mapping[str, Any] | None = None,
    swapped_layers: tuple[int, int] | None = None,
    n_tokens: int = 0,
) -> Path:
    """Copy `source` to `target`.

    `fields`: other values by key (None: left out; a new key has the type of its value).
    `swapped_layers`: two layers that exchange their tensors.
    `n_tokens`: truncate the vocabulary to this many tokens, and its matrices to as many rows.
    """
    reader = GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    other = dict(fields or {})
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = other.pop(name, field.contents()) if name in other else field.contents()
        if value is None:
            continue
        if n_tokens and name in _PER_TOKEN:
            value = value[:n_tokens]
        if n_tokens and name.endswith(".vocab_size"):
            value = n_tokens
        kind, *of = field.types
        writer.add_key_value(name, value, kind, of[-1] if of else None)
    for name, value in other.items():
        if value is not None:
            writer.add_key_value(name, value, GGUFValueType.get_type(value))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in tensors:
        tensor = tensors[_place(name, swapped_layers)]
        data = tensor.data
        if n_tokens and name in ("token_embd.weight", "output.weight"):
            data = data[:n_tokens]
        writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


_PER_TOKEN = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def _place(name: str, swapped_layers: tuple[int, int] | None) -> str:
    if swapped_layers is not None:
        a, b = swapped_layers
        for here, there in ((a, b), (b, a)):
            if name.startswith(f"blk.{here}."):
                return name.replace(f"blk.{here}.", f"blk.{there}.", 1)
    return name


def write_quant(source: Path, target: Path, kind: str) -> Path:
    """Quantise a small F32 model: every matrix in the format `kind`, with gguf's own NumPy code."""
    reader = GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            main, *of = field.types
            writer.add_key_value(name, field.contents(), main, of[-1] if of else None)
    quant = GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        if len(tensor.shape) > 1:
            data = quantize(np.array(tensor.data), quant)
            writer.add_tensor(tensor.name, data, raw_dtype=quant)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
