"""Load an mlx-lm model from a LoadSpec, or raise an error with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters, load_model

from localllm_backends.contract import (
    BackendFailure,
    LoadError,
    LoadSpec,
    OutOfMemoryError,
    Placement,
)
from localllm_backends.mlx import draft_heads, memory, mtp
from localllm_backends.mlx.adapters import AdapterLayers
from localllm_backends.mlx.backend import Loaded, MlxBackend
from localllm_backends.mlx.files import check_folder
from localllm_backends.mlx.kv_fidelity import fast_enough
from localllm_backends.mlx.kv_types import own_shapes, shapes_with
from localllm_backends.mlx.shapes import Shapes
from localllm_backends.mlx.vocabulary import read_json

# As for llama.cpp: small steps cost no speed on a CPU and shorten the waits of other requests. On a
# GPU, mlx-lm's own batch size.
_CPU_BATCH = 128
_GPU_BATCH = 2048
# Tokens that can be removed again from a sliding window: more than any draft has, and few compared
# with the window.
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
        raise LoadError("MLX has no setting for CPU threads: do not set a number of threads")
    if spec.kv_type_k != spec.kv_type_v:
        raise LoadError(
            f"MLX stores keys and values with the same type, but {spec.kv_type_k} and "
            f"{spec.kv_type_v} were requested"
        )
    together = replace(spec.placement, gpu_layers=-1, workers=()) == Placement()
    if spec.n_gpu_layers > 0 or not together:
        raise LoadError(
            "MLX keeps a model in one memory, so its layers and experts can't be placed separately"
        )
    if spec.adapters and spec.placement.workers:
        raise LoadError(
            "mlx-lm can't split a model with an adapter over machines: run the model on one "
            "machine, or fuse the adapter with `mlx_lm.fuse`"
        )


def read_model(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model, without reading its weights, and its config. Never runs code from the
    checkpoint."""
    # Older mlx-lm versions always import such a file, and newer ones by default. So mlx-lm is not
    # called here.
    if read_json(folder / "config.json").get("model_file") is not None:
        raise LoadError(
            f"{folder.name!r} needs its own Python code to build the model; localllm does not "
            "run code from a checkpoint"
        )
    try:
        return load_model(folder, lazy=True)  # type: ignore[no-any-return]
    except Exception as e:
        raise LoadError(f"mlx-lm can't load {folder.name!r}: {_short(e)}") from e


def half_precision(chip: str, family: str) -> bool:
    """Return whether bfloat16 weights should be computed in float16.

    True on M1 and M2, which emulate bfloat16 (prompts 20 to 33 % slower:
    github.com/jundot/omlx/issues/604), for families that were seen to stay in float16's range.
    """
    return re.match(r"Apple M[12]\b", chip) is not None and family in _HALF_FAMILIES


def use_fastest_type(model: Any, config: dict[str, Any]) -> None:
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
    seqs = str(error).strip().splitlines()
    if seqs:
        return seqs[0][:300]
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
    use_fastest_type(model, config)
    adapters = AdapterLayers(model, spec.adapters, _short)
    if group is not None:
        shard(model, config, group)
    n_batch = spec.n_batch
    if not n_batch:
        n_batch = _CPU_BATCH if mx.default_device() == mx.cpu else _GPU_BATCH
    own, shapes = probe(model, spec, n_batch)
    heads, unavailable_heads = read_heads(model, spec, folder, config, group)
    facts = {**(config.get("text_config") or {}), **config}
    trained = int(facts.get("max_position_embeddings") or 0)
    n_ctx = spec.n_ctx or min(trained or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    token_bytes, line_bytes = shapes.sizes()
    weights = [a for _, a in tree_flatten(model.parameters())] + adapters.arrays
    adapters.use_loaded()
    if heads is not None:
        token_bytes += draft_heads.shapes(heads).sizes()[0]
        weights += heads.arrays
    weights_bytes = sum(int(a.nbytes) for a in weights)
    needed_bytes = weights_bytes + n_ctx * token_bytes + spec.n_seq_max * line_bytes
    memory.require(
        needed_bytes,
        f"{folder.name!r} ({weights_bytes / 1e9:.2f} GB of weights "
        f"and the KV cache of {n_ctx:,} tokens)",
    )
    read_weights(weights, folder.name, on_progress)
    kv_note = ""
    if group is None:
        shapes, kv_note = fast_enough(model, own, shapes)
    return Loaded(
        model,
        adapters,
        shapes,
        own,
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
        unavailable_heads=unavailable_heads,
        kv_note=kv_note,
    )


def read_heads(
    model: Any, spec: LoadSpec, folder: Path, config: dict[str, Any], group: Any
) -> tuple[draft_heads.DraftModule | None, str]:
    """Return the requested drafter, or the model's draft heads; or why optional ones are left out.

    Raises LoadError if a required drafter or required heads can't be used.
    """
    if not spec.mtp and not spec.drafter:
        return None, ""
    try:
        if group is not None:
            raise LoadError(
                "draft heads can't be split over machines: run the model on one "
                "machine, or with --draft off"
            )
        if spec.drafter:
            # Only this module needs mlx-vlm.
            from localllm_backends.mlx.trained_drafter import read_drafter

            return read_drafter(spec.drafter, model, config), ""
        heads = mtp.read_heads(folder, model, config)
        use_fastest_type(heads, config)
    except LoadError as e:
        if not spec.drafter_optional:
            raise
        return None, f"the model runs without its drafter: {e}" if spec.drafter else str(e)
    return heads, ""


def shard(model: Any, config: dict[str, Any], group: Any) -> None:
    """Reduce `model` to this machine's share of every layer (mlx-lm's tensor parallelism).

    Raises LoadError if mlx-lm can't split it, or if it can't be split evenly.
    """
    n = int(group.size())
    kind = str(config.get("model_type", ""))
    if not hasattr(model, "shard"):
        raise LoadError(
            f"mlx-lm can't split {kind!r} models over machines",
            "run the model on one machine",
        )
    text = config.get("text_config", config)
    even = "use a number of machines that divides it"
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = text.get(name)
        if isinstance(heads, int) and heads % n:
            raise LoadError(
                f"{n} machines can't split this model evenly: its number of {name} is {heads}", even
            )
    model.shard(group)


def probe(model: Any, spec: LoadSpec, n_batch: int) -> tuple[Shapes, Shapes]:
    """Determine the exact shapes of the model's memory without computing, with its own KV type and
    with the requested one.

    MLX knows the shapes of arrays before they are computed. Raises LoadError if the requested KV
    type is not possible.
    """
    caches = list(make_prompt_cache(model))
    own = own_shapes(model, caches, min(n_batch, _REWIND_TOKENS))
    return own, shapes_with(model, caches, own, spec.kv_type_k)
