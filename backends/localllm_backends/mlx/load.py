"""Load an mlx-lm model from a LoadSpec, or raise an error with the reason."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters, load_adapters, load_model

from localllm_backends.contract import (
    BackendFailure,
    KvType,
    LoadError,
    LoadSpec,
    OutOfMemoryError,
    Placement,
)
from localllm_backends.mlx import memory, mtp
from localllm_backends.mlx.attention import KvFormat
from localllm_backends.mlx.backend import Loaded, MlxBackend
from localllm_backends.mlx.files import check_folder
from localllm_backends.mlx.sequence_cache import Layout
from localllm_backends.mlx.shapes import Shapes
from localllm_backends.mlx.vocabulary import read_json

QUANTISED_BITS = {"q8_0": 8, "q4_0": 4}
# The contract's names for the types in which a model can compute keys and values.
_OWN_TYPES: dict[str, KvType] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# As for llama.cpp: small steps cost no speed on a CPU and shorten the waits of other requests. On a
# GPU, mlx-lm's own batch size.
_CPU_BATCH = 128
_GPU_BATCH = 2048
_GROUP_SIZES = (64, 32)
# Tokens that can be taken back in a sliding window: longer than any draft, with little memory
# compared with the window's own.
_REWIND_TOKENS = 512
_DEFAULT_CONTEXT = 8192
_PARTS_OF_PROGRESS = 16
# Model families that others serve in float16, mostly as AWQ files, whose kernels support only
# float16. Excluded are Gemma (its hidden states exceed 65,504:
# github.com/unslothai/unsloth/pull/5092), Falcon-H1 (github.com/unslothai/unsloth-zoo/pull/212),
# dense Qwen3 (github.com/vllm-project/vllm/pull/33972), and all families without evidence.
_HALF_FAMILIES = {"llama", "mistral", "qwen3_5_moe"}


def check_spec(spec: LoadSpec) -> None:
    """Raise LoadError for settings that MLX does not have, so that no request is silently
    ignored."""
    if spec.n_threads:
        raise LoadError("MLX has no setting for CPU threads: leave the number of threads to it")
    if spec.kv_type_k != spec.kv_type_v:
        raise LoadError(
            "MLX stores keys and values in one type: "
            f"{spec.kv_type_k} and {spec.kv_type_v} were asked for"
        )
    together = replace(spec.placement, gpu_layers=-1, workers=()) == Placement()
    if spec.n_gpu_layers > 0 or not together:
        raise LoadError(
            "MLX keeps a model in one memory: its layers and experts can't be placed one by one"
        )
    if spec.drafter and not spec.drafter_optional:
        raise LoadError(
            "trained drafters (EAGLE-3, DFlash) run on llama.cpp only, beside a GGUF file"
        )
    if len(spec.adapters) > 1:
        raise LoadError("mlx-lm lays one adapter over a model: fuse the first with `mlx_lm.fuse`")
    if spec.adapters and spec.placement.workers:
        raise LoadError(
            "mlx-lm shares no adapted model between machines: "
            "run it on one, or fuse the adapter with `mlx_lm.fuse`"
        )


def read_model(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model, without reading its weights, and its config. Never runs code from the
    checkpoint."""
    # Older mlx-lm versions import such a file without asking, newer ones unless told not to.
    # Neither is called.
    if read_json(folder / "config.json").get("model_file") is not None:
        raise LoadError(
            f"{folder.name!r} wants to run Python code of its own to build the model, "
            "which is not done"
        )
    try:
        return load_model(folder, lazy=True)  # type: ignore[no-any-return]
    except Exception as e:
        raise LoadError(f"mlx-lm can't load {folder.name!r}: {_short(e)}") from e


def lay_over(model: Any, spec: LoadSpec) -> None:
    """Add the adapters to `model`, whose weights are not read yet, with mlx-lm's own code.

    Raises LoadError if an adapter belongs to another model.
    """
    for adapter in spec.adapters:
        try:
            load_adapters(model, adapter.path)
        except Exception as e:
            # The mismatch comes after a line with the folder's name.
            why = str(e).rpartition("tensors:\n")[2]
            name = Path(adapter.path).name
            raise LoadError(
                f"{name!r} is no adapter for this model: {_short(ValueError(why))}"
            ) from e
        for layer in model.modules():
            if "lora_a" in layer:
                layer.scale *= adapter.scale
    model.eval()


def half_precision(chip: str, family: str) -> bool:
    """Return whether bfloat16 weights should be computed in float16.

    True on M1 and M2, which emulate bfloat16 (prompts 20 to 33 % slower:
    github.com/jundot/omlx/issues/604), for families that were seen to stay in float16's range.
    """
    return re.match(r"Apple M[12]\b", chip) is not None and family in _HALF_FAMILIES


def as_computed_fastest(model: Any, config: dict[str, Any]) -> None:
    """Convert bfloat16 weights of `model`, not read yet, to float16 if this GPU and family
    benefit."""
    family = str(config.get("model_type", ""))
    chip = str(mx.device_info().get("device_name", ""))
    if mx.default_device() == mx.Device(mx.cpu) or not half_precision(chip, family):
        return
    model.update(tree_map(_half, model.parameters()))


def _half(array: Any) -> Any:
    """Return a bfloat16 `array` in float16, and any other array unchanged."""
    if array.dtype == mx.bfloat16:
        return array.astype(mx.float16)
    return array


def read_weights(
    arrays: list[Any], name: str, on_progress: Callable[[float], None] | None = None
) -> None:
    """Read the weights in parts, so that progress can be reported."""
    n = max(1, len(arrays) // _PARTS_OF_PROGRESS)
    try:
        for stop in range(n, len(arrays) + n, n):
            mx.eval(arrays[stop - n : stop])
            if on_progress is not None:
                on_progress(min(1.0, stop / len(arrays)))
    except Exception as e:
        if memory.out_of_memory(e):
            raise OutOfMemoryError(
                f"not enough memory for the weights of {name!r}: {_short(e)}"
            ) from e
        raise LoadError(f"the weights of {name!r} can't be read: {_short(e)}") from e


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if lines:
        return lines[0][:300]
    return type(error).__name__


def load(spec: LoadSpec, on_progress: Callable[[float], None] | None = None) -> MlxBackend:
    return MlxBackend(read_checkpoint(spec, on_progress))


def read_checkpoint(
    spec: LoadSpec, on_progress: Callable[[float], None] | None = None, group: Any = None
) -> Loaded:
    """Read everything that a backend needs. Raises LoadError or OutOfMemoryError.

    With a `group` of mx.distributed, reads this machine's share.
    """
    check_spec(spec)
    folder = check_folder(spec.path)
    if spec.n_gpu_layers == 0:
        mx.set_default_device(mx.cpu)
    try:
        return _read(spec, folder, on_progress, group)
    except BackendFailure:
        raise
    except Exception as e:
        if memory.out_of_memory(e):
            raise OutOfMemoryError(f"not enough memory to load {folder.name!r}: {_short(e)}") from e
        raise LoadError(f"{folder.name!r} can't be loaded: {_short(e)}") from e
    finally:
        mx.clear_cache()


def _read(
    spec: LoadSpec, folder: Path, on_progress: Callable[[float], None] | None, group: Any
) -> Loaded:
    model, config = read_model(folder)
    n_params = int(get_total_parameters(model))
    as_computed_fastest(model, config)
    lay_over(model, spec)
    if group is not None:
        shard(model, config, group)
    n_batch = spec.n_batch
    if not n_batch:
        n_batch = _CPU_BATCH if mx.default_device() == mx.cpu else _GPU_BATCH
    shapes = probe(model, spec, n_batch)
    heads, left_out = draft_heads(model, spec, folder, config, group)
    facts = {**(config.get("text_config") or {}), **config}
    trained = int(facts.get("max_position_embeddings") or 0)
    n_ctx = spec.n_ctx or min(trained or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    token_bytes, line_bytes = shapes.sizes()
    weights = [a for _, a in tree_flatten(model.parameters())]
    if heads is not None:
        token_bytes += mtp.shapes(heads).sizes()[0]
        weights += [a for _, a in tree_flatten(heads.parameters())]
    weights_bytes = sum(int(a.nbytes) for a in weights)
    needed_bytes = weights_bytes + n_ctx * token_bytes + spec.n_seq_max * line_bytes
    memory.require(
        needed_bytes,
        f"{folder.name!r} ({weights_bytes / 1e9:.2f} GB of weights "
        f"and the KV cache of {n_ctx:,} tokens)",
    )
    read_weights(weights, folder.name, on_progress)
    return Loaded(
        model,
        shapes,
        spec,
        folder,
        config,
        n_ctx=n_ctx,
        n_ctx_train=trained,
        n_batch=n_batch,
        weights_bytes=weights_bytes,
        n_params=n_params,
        n_shares=1 if group is None else int(group.size()),
        heads=heads,
        left_out=left_out,
    )


def draft_heads(
    model: Any, spec: LoadSpec, folder: Path, config: dict[str, Any], group: Any
) -> tuple[mtp.MtpModule | None, str]:
    """Return the model's draft heads if requested, or why optional heads are left out.

    Raises LoadError if required heads can't be used.
    """
    if not spec.mtp:
        return None, ""
    try:
        if group is not None:
            raise LoadError(
                "draft heads can't be shared by several machines: "
                "run the model on one, or with --draft off"
            )
        heads = mtp.read_heads(folder, model, config)
        as_computed_fastest(heads, config)
    except LoadError as e:
        if not spec.drafter_optional:
            raise
        return None, str(e)
    return heads, ""


def shard(model: Any, config: dict[str, Any], group: Any) -> None:
    """Reduce `model` to this machine's share of every layer (mlx-lm's tensor parallelism).

    Raises LoadError if mlx-lm can't split it, or if it can't be split evenly.
    """
    n = int(group.size())
    kind = str(config.get("model_type", ""))
    if not hasattr(model, "shard"):
        raise LoadError(
            f"mlx-lm has no form of {kind!r} models that several machines can share",
            "run it on one",
        )
    text = config.get("text_config", config)
    even = "take a number of machines that divides it"
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = text.get(name)
        if isinstance(heads, int) and heads % n:
            raise LoadError(
                f"{n} machines can't share this model evenly: its {name} are {heads}", even
            )
    model.shard(group)


def probe(model: Any, spec: LoadSpec, n_batch: int) -> Shapes:
    """Determine the exact shapes of the model's memory without computing.

    MLX knows the shapes of arrays before they are computed. Raises LoadError if the requested KV
    type is not possible.
    """
    caches = list(make_prompt_cache(model))
    slack = min(n_batch, _REWIND_TOKENS)
    shapes = Shapes.of(model, Layout(caches, KvFormat(), slack))
    own = _own_type(shapes.kv)
    asked = spec.kv_type_k
    if asked in QUANTISED_BITS:
        quantised = _quantised(model, caches, slack, shapes, QUANTISED_BITS[asked])
        if quantised is None:
            raise LoadError(
                f"this model's KV cache can't be stored as {asked} in MLX (sliding windows, "
                "latent attention and heads that 32 does not divide can't); "
                f"it is kept as {own}"
            )
        return replace(quantised, kv_type=asked)
    # In the contract, "f16" means "not quantised". MLX then keeps the type in which the model
    # computes, and `info` gives it.
    if asked not in ("f16", own):
        raise LoadError(
            f"MLX keeps this model's KV cache as {own} (or f16 meaning the same); "
            f"{asked} can't be had"
        )
    return replace(shapes, kv_type=own)


def _own_type(kv: list[Any]) -> KvType:
    """Return the contract's name for the type of `kv`, the model's keys and values.

    Raises LoadError if there is no such name.
    """
    if not kv:
        return "f32"
    name = str(kv[0].dtype).removeprefix("mlx.core.")
    if name not in _OWN_TYPES:
        raise LoadError(
            f"this model keeps its KV cache as {name}, which the MLX backend does not know "
            f"(it knows {', '.join(_OWN_TYPES)})"
        )
    return _OWN_TYPES[name]


def _quantised(
    model: Any, caches: list[Any], slack: int, shapes: Shapes, bits: int
) -> Shapes | None:
    """Return the shapes of a KV cache with `bits` per number; None if the model does not support
    it."""
    if not shapes.kv or shapes.layout.windows:
        return None
    # Every head's width must be a multiple of the quantisation group.
    common_width = math.gcd(*shapes.widths)
    group = next((size for size in _GROUP_SIZES if common_width % size == 0), None)
    if group is None:
        return None
    # Some attention code reads keys and values as arrays, and fails while the graph is built,
    # before any work.
    with suppress(Exception):
        return Shapes.of(model, Layout(caches, KvFormat(bits, group), slack))
    return None
