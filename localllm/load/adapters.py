"""LoRA adapters from the `lora` setting, checked by their headers before the model is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from localllm import json_store
from localllm.errors import UnsupportedError
from localllm.library.catalog import OpenedModel, read_header
from localllm_backends.contract import Declaration, LoraAdapter
from localllm_catalog.gguf import GgufHeader
from localllm_catalog.types import Model

_FILE_AND_SCALE = re.compile(r"(?s)^(.+?)(?::(-?(?:\d{1,4}(?:\.\d*)?|\.\d+)))?\Z")
_MLX_WEIGHTS = "adapters.safetensors"
_EMBEDDING_TABLE = "token_embd.weight"
_MATRIX_SUFFIXES = (".lora_a", ".lora_b")


def file_and_scale(text: str) -> tuple[Path, float]:
    """Return the parts of FILE[:SCALE], with the absolute path of the file or folder."""
    # A colon that is not followed by a number is part of the file's name.
    [(file, scale)] = _FILE_AND_SCALE.findall(text)
    return Path(os.path.expanduser(file)).absolute(), float(scale or 1)


def adapter_named(text: str, opened: OpenedModel, engine: Declaration) -> LoraAdapter:
    """Return the adapter FILE[:SCALE] for an opened model.

    Raises UnsupportedError if the headers show that the adapter does not fit, and ModelFileError.
    """
    path, scale = file_and_scale(text)
    reason = _fault(path, opened, engine)
    if reason:
        raise UnsupportedError(
            f"--lora {path.name}: {reason}",
            hint="give an adapter that was trained for this model: FILE, or FILE:SCALE such as "
            "style.gguf:0.5",
        )
    if path.is_dir():
        n_bytes = (path / _MLX_WEIGHTS).stat().st_size
    else:
        n_bytes = read_header(path).weights_bytes
    return LoraAdapter(str(path), scale, n_bytes)


def with_adapter_bytes(model: Model | None, adapters: tuple[LoraAdapter, ...]) -> Model | None:
    """Add the size of `adapters` to the weights of `model`, evenly over its layers.

    Every token reads the adapters that are applied by default, so they count as active weights.
    """
    added_bytes = sum(adapter.n_bytes for adapter in adapters)
    active_bytes = sum(adapter.n_bytes for adapter in adapters if adapter.scale)
    if model is None or not model.variants or not added_bytes:
        return model
    variant_alone = model.variants[0]
    layers = variant_alone.layer_bytes
    variant = replace(
        variant_alone,
        file_bytes=variant_alone.file_bytes + added_bytes,
        weights_bytes=variant_alone.weights_bytes and variant_alone.weights_bytes + added_bytes,
        active_bytes=variant_alone.active_bytes and variant_alone.active_bytes + active_bytes,
        layer_bytes=tuple(
            (dense + added_bytes // len(layers), experts) for dense, experts in layers
        ),
        adapter_bytes=active_bytes,
    )
    return replace(model, variants=(variant,))


# -- why an adapter can't be used: "" if no problem is known --------------------------------------


def _fault(path: Path, opened: OpenedModel, engine: Declaration) -> str:
    """Return why the adapter at `path` can't be applied to the opened model."""
    name = opened.local.name
    if not engine.adapters:
        return f"{engine.label} does not support adapters"
    if not path.exists():
        return "there is no such file or folder"
    if path.is_dir():
        if engine.adapters != "folder":
            return f"adapters for {name} must be GGUF files, but this is a folder"
        return _fault_of_folder(path)
    if engine.adapters == "folder":
        return f"adapters for {name} are folders of mlx-lm's, and this is a file"
    if opened.header is None:
        return ""
    return _fault_of_file(read_header(path), opened.header)


def _fault_of_folder(folder: Path) -> str:
    """Check the files of an mlx-lm adapter.

    mlx-lm itself checks that the adapter is for this model, before it reads any weights.
    """
    config = json_store.read(folder / "adapter_config.json")
    if "peft_type" in config:
        return (
            "it is laid out as PEFT's are: "
            "llama.cpp's convert_lora_to_gguf makes one for GGUF models of it"
        )
    if not config or not (folder / _MLX_WEIGHTS).is_file():
        return f"it lacks what mlx-lm's adapters have: adapter_config.json and {_MLX_WEIGHTS}"
    if config.get("fine_tune_type", "lora") != "lora":
        return (
            "it is another kind of fine-tune (its fine_tune_type): "
            "`mlx_lm.fuse` makes a model of it"
        )
    return ""


def _fault_of_file(adapter: GgufHeader, base: GgufHeader) -> str:
    """Make the same checks as llama.cpp (src/llama-adapter.cpp), including those that abort it."""
    stated = (adapter.text("general.type"), adapter.text("adapter.type"))
    if "control_vector" in stated or adapter.architecture == "controlvector":
        return "it is a control vector, which is not run here"
    if stated != ("adapter", "lora"):
        return "it is no LoRA adapter, by its header's adapter.type"
    if "adapter.alora.invocation_tokens" in adapter.metadata:
        return "it is an aLoRA, which works behind its invocation tokens alone and is not run here"
    if adapter.architecture != base.architecture:
        return f"it is for {adapter.architecture} models, and this one is {base.architecture}"
    return _fault_of_tensors(adapter, base)


def _fault_of_tensors(adapter: GgufHeader, base: GgufHeader) -> str:
    matrices = {t.name: t.shape for t in adapter.tensors if t.name.endswith(_MATRIX_SUFFIXES)}
    names = dict.fromkeys(matrix[: -len(_MATRIX_SUFFIXES[0])] for matrix in matrices)
    if not names:
        return "it changes no weights"
    shapes = {tensor.name: tensor.shape for tensor in base.tensors}
    if _EMBEDDING_TABLE in names and "output.weight" not in shapes:
        return (
            f"it changes {_EMBEDDING_TABLE}, which is this model's output as well, "
            "where llama.cpp can't add to it"
        )
    for name in names:
        fault = _fault_of_matrices(name, shapes.get(name, ()), matrices)
        if fault:
            return fault
    for tensor in base.tensors:
        if tensor.type == "NVFP4" and tensor.name in names:
            return f"llama.cpp can't apply an adapter to NVFP4 weights, such as {tensor.name}"
    return ""


def _fault_of_matrices(
    name: str, weight_shape: tuple[int, ...], matrices: Mapping[str, tuple[int, ...]]
) -> str:
    """Check the two matrices for the weight `name`.

    `weight_shape` is the shape of the weight (empty: the model has no such weight).
    """
    if not weight_shape:
        return f"it changes {name}, which this model does not have: it is another model's"
    first = matrices.get(name + _MATRIX_SUFFIXES[0], ())
    second = matrices.get(name + _MATRIX_SUFFIXES[1], ())
    if not first or not second:
        return f"it has one of the two matrices for {name} alone"
    n_in, *n_out = weight_shape
    rank = second[0]
    expected_shapes = [(n_in, rank, *n_out[1:]), (rank, *n_out)]
    # Rows of the token embedding table are looked up, not multiplied.
    if name == _EMBEDDING_TABLE:
        expected_shapes = [(rank, *n_out), (rank, n_in)]
    if [first, second] == expected_shapes:
        return ""
    return (
        f"{name} is {_shape_text(weight_shape)} in this model, and the two matrices for it are "
        f"{_shape_text(first)} and {_shape_text(second)}: it is another model's, or "
        "its ranks differ"
    )


def _shape_text(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
