"""LoRA adapters over a model: what the `lora` setting names, checked by headers before anything is
loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from localllm import json_store
from localllm.errors import UnsupportedError
from localllm.library.catalog import OpenedModel, read_header
from localllm_backends.contract import Declaration, LoraAdapter
from localllm_backends.reasons import first_reason
from localllm_catalog.gguf import GgufHeader
from localllm_catalog.types import Model

_NAMED = re.compile(r"(?s)^(.+?)(?::(-?(?:\d{1,4}(?:\.\d*)?|\.\d+)))?\Z")
_MLX_WEIGHTS = "adapters.safetensors"
_TABLE = "token_embd.weight"
_HALVES = (".lora_a", ".lora_b")
# What may be in the way, and the sentence that says so.
_Objections = Iterator[tuple[object, str]]


def adapter_named(named: str, opened: OpenedModel, engine: Declaration) -> LoraAdapter:
    """The adapter FILE[:SCALE] for an opened model. Raises UnsupportedError for what is none of
    it, as far as headers say, and ModelFileError."""
    # A colon before anything but a number is the file's own.
    [(file, scale)] = _NAMED.findall(named)
    path = Path(os.path.expanduser(file)).absolute()
    reason = first_reason(_objections(path, opened, engine))
    if reason:
        raise UnsupportedError(
            f"--lora {path.name}: {reason}",
            hint="name an adapter of this very model: FILE, or FILE:SCALE such as style.gguf:0.5",
        )
    if path.is_dir():
        n_bytes = (path / _MLX_WEIGHTS).stat().st_size
    else:
        n_bytes = read_header(path).weights_bytes
    return LoraAdapter(str(path), float(scale or 1), n_bytes)


def planned_with(model: Model | None, adapters: tuple[LoraAdapter, ...]) -> Model | None:
    """`model` with `adapters` among its weights, a share in each layer: every token reads them."""
    more = sum(adapter.n_bytes for adapter in adapters)
    if model is None or not model.variants or not more:
        return model
    files = model.variants[0]
    layers = files.layer_bytes
    variant = replace(
        files,
        file_bytes=files.file_bytes + more,
        weights_bytes=files.weights_bytes and files.weights_bytes + more,
        active_bytes=files.active_bytes and files.active_bytes + more,
        layer_bytes=tuple((dense + more // len(layers), experts) for dense, experts in layers),
        adapter_bytes=more,
    )
    return replace(model, variants=(variant,))


# -- what is in the way: each is asked once none before it holds -----------------------------------


def _objections(path: Path, opened: OpenedModel, engine: Declaration) -> _Objections:
    is_folder = path.is_dir()
    name = opened.local.name
    wanted = "folders of mlx-lm's"
    given = "a file"
    if is_folder:
        wanted = "GGUF files"
        given = "a folder"
    yield not engine.adapters, f"{engine.label} takes no adapters"
    yield not path.exists(), "there is no such file or folder"
    yield (
        is_folder != (engine.adapters == "folder"),
        f"adapters for {name} are {wanted}, and this is {given}",
    )
    if is_folder:
        # Whether it is this model's mlx-lm says, before it reads any weights.
        yield from _of_folder(path)
    elif opened.header is not None:
        yield from _of_header(read_header(path), opened.header)


def _of_folder(folder: Path) -> _Objections:
    config = json_store.read(folder / "adapter_config.json")
    yield (
        "peft_type" in config,
        "it is laid out as PEFT's are: llama.cpp's convert_lora_to_gguf makes one for GGUF "
        "models of it",
    )
    yield (
        not config or not (folder / _MLX_WEIGHTS).is_file(),
        f"it lacks what mlx-lm's adapters have: adapter_config.json and {_MLX_WEIGHTS}",
    )
    yield (
        config.get("fine_tune_type", "lora") != "lora",
        "it is another kind of fine-tune (its fine_tune_type): `mlx_lm.fuse` makes a model of it",
    )


def _of_header(adapter: GgufHeader, base: GgufHeader) -> _Objections:
    """What llama.cpp checks when it loads one (src/llama-adapter.cpp), and what it aborts at."""
    stated = adapter.text("general.type"), adapter.text("adapter.type")
    yield (
        "control_vector" in stated or adapter.architecture == "controlvector",
        "it is a control vector, which is not run here",
    )
    yield stated != ("adapter", "lora"), "it is no LoRA adapter, by its header's adapter.type"
    yield (
        "adapter.alora.invocation_tokens" in adapter.metadata,
        "it is an aLoRA, which works behind its invocation tokens alone and is not run here",
    )
    yield (
        adapter.architecture != base.architecture,
        f"it is for {adapter.architecture} models, and this one is {base.architecture}",
    )
    halves = {t.name: t.shape for t in adapter.tensors if t.name.endswith(_HALVES)}
    names = dict.fromkeys(half[: -len(_HALVES[0])] for half in halves)
    yield not names, "it changes no weights"
    shapes = {tensor.name: tensor.shape for tensor in base.tensors}
    yield (
        _TABLE in names and "output.weight" not in shapes,
        f"it changes {_TABLE}, which is this model's output as well, where llama.cpp can't add to "
        "it",
    )
    for name in names:
        yield from _of_pair(name, shapes.get(name, ()), halves)
    rigid = [t.name for t in base.tensors if t.type == "NVFP4" and t.name in names]
    yield rigid, f"llama.cpp lays nothing over NVFP4 weights, such as {''.join(rigid[:1])}"


def _of_pair(
    name: str, weight: tuple[int, ...], halves: Mapping[str, tuple[int, ...]]
) -> _Objections:
    """What speaks against the two matrices for a weight of that shape; () where there is none."""
    yield not weight, f"it changes {name}, which this model does not have: it is another model's"
    pair = [halves.get(name + half, ()) for half in _HALVES]
    yield not all(pair), f"it has one of the two matrices for {name} alone"
    n_in, *n_out = weight
    rank = pair[1][0]
    fitting = [(n_in, rank, *n_out[1:]), (rank, *n_out)]
    # A row of the table of tokens is looked up, not multiplied with.
    if name == _TABLE:
        fitting = [(rank, *n_out), (rank, n_in)]
    sizes = [" × ".join(map(str, shape)) for shape in (weight, *pair)]
    yield (
        pair != fitting,
        f"{name} is {sizes[0]} in this model, and the two matrices for it are {sizes[1]} and "
        f"{sizes[2]}: it is another model's, or its ranks differ",
    )
