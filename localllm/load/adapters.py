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

_NAMED = re.compile(r"(?s)^(.+?)(?::(-?(?:\d{1,4}(?:\.\d*)?|\.\d+)))?\Z")
_MLX_WEIGHTS = "adapters.safetensors"
_TABLE = "token_embd.weight"
_HALVES = (".lora_a", ".lora_b")


def file_and_scale(named: str) -> tuple[Path, float]:
    """Return the parts of FILE[:SCALE], with the absolute path of the file or folder."""
    # A colon that is not followed by a number is part of the file's name.
    [(file, scale)] = _NAMED.findall(named)
    return Path(os.path.expanduser(file)).absolute(), float(scale or 1)


def adapter_named(named: str, opened: OpenedModel, engine: Declaration) -> LoraAdapter:
    """Return the adapter FILE[:SCALE] for an opened model.

    Raises UnsupportedError if the headers show that the adapter does not fit, and ModelFileError.
    """
    path, scale = file_and_scale(named)
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


def planned_with(model: Model | None, adapters: tuple[LoraAdapter, ...]) -> Model | None:
    """Add the size of `adapters` to the weights of `model`, evenly over its layers.

    Every token reads the adapters that are applied by default, so they count as active weights.
    """
    more = sum(adapter.n_bytes for adapter in adapters)
    read = sum(adapter.n_bytes for adapter in adapters if adapter.scale)
    if model is None or not model.variants or not more:
        return model
    files = model.variants[0]
    layers = files.layer_bytes
    variant = replace(
        files,
        file_bytes=files.file_bytes + more,
        weights_bytes=files.weights_bytes and files.weights_bytes + more,
        active_bytes=files.active_bytes and files.active_bytes + read,
        layer_bytes=tuple((dense + more // len(layers), experts) for dense, experts in layers),
        adapter_bytes=read,
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
    halves = {t.name: t.shape for t in adapter.tensors if t.name.endswith(_HALVES)}
    names = dict.fromkeys(half[: -len(_HALVES[0])] for half in halves)
    if not names:
        return "it changes no weights"
    shapes = {tensor.name: tensor.shape for tensor in base.tensors}
    if _TABLE in names and "output.weight" not in shapes:
        return (
            f"it changes {_TABLE}, which is this model's output as well, "
            "where llama.cpp can't add to it"
        )
    for name in names:
        fault = _fault_of_pair(name, shapes.get(name, ()), halves)
        if fault:
            return fault
    for tensor in base.tensors:
        if tensor.type == "NVFP4" and tensor.name in names:
            return f"llama.cpp can't apply an adapter to NVFP4 weights, such as {tensor.name}"
    return ""


def _fault_of_pair(
    name: str, weight: tuple[int, ...], halves: Mapping[str, tuple[int, ...]]
) -> str:
    """Check the two matrices for the weight `name`.

    `weight` is the shape of the weight (empty: the model has no such weight).
    """
    if not weight:
        return f"it changes {name}, which this model does not have: it is another model's"
    first = halves.get(name + _HALVES[0], ())
    second = halves.get(name + _HALVES[1], ())
    if not first or not second:
        return f"it has one of the two matrices for {name} alone"
    n_in, *n_out = weight
    rank = second[0]
    fitting = [(n_in, rank, *n_out[1:]), (rank, *n_out)]
    # Rows of the token embedding table are looked up, not multiplied.
    if name == _TABLE:
        fitting = [(rank, *n_out), (rank, n_in)]
    if [first, second] == fitting:
        return ""
    return (
        f"{name} is {_product(weight)} in this model, and the two matrices for it are "
        f"{_product(first)} and {_product(second)}: it is another model's, or its ranks differ"
    )


def _product(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
