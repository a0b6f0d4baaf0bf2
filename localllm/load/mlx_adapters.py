"""Checks by headers whether an mlx-lm adapter fits the model in a folder, as mlx-lm does at load."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm import json_store
from localllm.library import names

Shapes = Mapping[str, tuple[int, ...]]
_MAX_HEADER_BYTES = 100 * 2**20
_LAYER_MODULE = re.compile(r"\blayers\.(\d+)\.(.+)")
_WORD_BITS = 32
_BITS = (2, 3, 4, 5, 6, 8)


def fits(folder: Path, model: Path) -> bool:
    """Return True if the headers show that the adapter in `folder` fits the weights in `model`.

    False also means that the headers don't show it, for example if mlx-lm renames the weights.
    """
    config = json_store.read(folder / "adapter_config.json")
    parameters = config.get("lora_parameters")
    n_layers = config.get("num_layers")
    if not isinstance(parameters, dict) or not isinstance(n_layers, int):
        return False
    try:
        adapter = _shapes(folder / "adapters.safetensors")
        weights: dict[str, tuple[int, ...]] = {}
        for file in names.mlx_weights(os.listdir(model)):
            weights |= _shapes(model / file)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return False
    depth = max((_layer(name)[0] for name in weights), default=-1) + 1
    for name, shape in adapter.items():
        module, _, matrix = name.rpartition(".")
        layer, key = _layer(module)
        if layer < depth - n_layers or key not in parameters.get("keys", [key]):
            return False
        if not _fits_weight(matrix, shape, parameters.get("rank"), weights, module):
            return False
    return bool(adapter) and "scale" in parameters and "dropout" in parameters


def _layer(name: str) -> tuple[int, str]:
    """Return the number of the layer of a tensor (-1: none), and its name in the layer."""
    match = _LAYER_MODULE.search(name)
    if match is None:
        return -1, name
    return int(match[1]), match[2]


def _fits_weight(
    matrix: str, shape: tuple[int, ...], rank: Any, weights: Shapes, module: str
) -> bool:
    """Return True if one matrix of the adapter fits the linear layer at `module`."""
    weight = weights.get(f"{module}.weight", ())
    if len(weight) != 2:
        return False
    n_out, n_in = weight
    if matrix == "lora_b":
        return shape == (rank, n_out)
    if matrix != "lora_a":
        return False
    sizes = [n_in]
    if f"{module}.scales" in weights:
        sizes = [n_in * _WORD_BITS // bits for bits in _BITS]
    return shape in [(size, rank) for size in sizes]


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a safetensors file. Raises OSError, ValueError, KeyError,
    TypeError or struct.error."""
    with file.open("rb") as stream:
        (n_bytes,) = struct.unpack("<Q", stream.read(8))
        if n_bytes > _MAX_HEADER_BYTES:
            raise ValueError("its header is too long")
        header = json.loads(stream.read(n_bytes))
    header.pop("__metadata__", None)
    return {name: tuple(tensor["shape"]) for name, tensor in header.items()}
