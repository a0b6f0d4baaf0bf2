"""Write LoRA adapters of tiny models, in GGUF and in mlx-lm's format, and the merged models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# The adapters' effect on a tiny model: large enough to change most greedy answers.
_STRENGTH = 0.7
TARGETS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")


def _matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) * _STRENGTH / np.sqrt(shape[-1])).astype(np.float32)


def write(
    path: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    architecture: str = "",
    targets: Iterable[str] = TARGETS,
    more: dict[str, Any] | None = None,
    skewed: int = 0,
) -> Path:
    """Write a GGUF adapter of the model `base` for its `targets`. If the output matrix is separate
    or "token_embd" is a target, the adapter also covers the token table. `more`: keys of its
    header; `skewed`: the difference in rank of its second matrices."""
    rng, model = np.random.default_rng(seed), gguf.GGUFReader(str(base))
    named = model.fields["general.architecture"].contents()
    w = gguf.GGUFWriter(str(path), architecture or named)
    keys = {"general.type": "adapter", "adapter.type": "lora", **(more or {})}
    for key, value in keys.items():
        if isinstance(value, str):
            w.add_string(key, value)
        else:
            w.add_array(key, value)
    w.add_float32("adapter.lora.alpha", alpha)
    wanted = [f".{target}.weight" for target in targets]
    untied = any(tensor.name == "output.weight" for tensor in model.tensors)
    for tensor in model.tensors:
        n_in, n_out, *experts = (int(n) for n in (*tensor.shape, 1)[: max(2, len(tensor.shape))])
        if tensor.name == "token_embd.weight" and (untied or "token_embd" in targets):
            # The table is used for lookups: A holds its rows, and B is not transposed.
            w.add_tensor(f"{tensor.name}.lora_a", _matrix(rng, n_out, rank))
            w.add_tensor(f"{tensor.name}.lora_b", _matrix(rng, n_in, rank + skewed))
        elif tensor.name.endswith(tuple(wanted)):
            w.add_tensor(f"{tensor.name}.lora_a", _matrix(rng, *experts, rank, n_in))
            w.add_tensor(f"{tensor.name}.lora_b", _matrix(rng, *experts, n_out, rank + skewed))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def merge(path: Path, base: Path, adapter: Path, scale: float = 1.0) -> Path:
    """Write a copy of the float32 model `base` with `adapter` merged into its weights."""
    shutil.copy(base, path)
    laid = gguf.GGUFReader(str(adapter))
    matrices = {tensor.name: np.array(tensor.data) for tensor in laid.tensors}
    alpha = float(laid.fields["adapter.lora.alpha"].contents())
    model = gguf.GGUFReader(str(path), "r+")
    for tensor in model.tensors:
        a, b = (matrices.get(f"{tensor.name}.lora_{half}") for half in "ab")
        if a is None or b is None:
            continue
        change = a @ b.T if tensor.name == "token_embd.weight" else b @ a
        tensor.data[:] += scale * alpha / b.shape[-1] * change
    model.data.flush()
    return path


def write_mlx(
    folder: Path, base: Path, *, rank: int = 4, seed: int = 0, config: dict[str, Any] | None = None
) -> Path:
    """Write an adapter of the checkpoint `base` as mlx-lm saves it, for three projections of each
    layer. `config`: additional keys of its adapter_config.json."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    rng = np.random.default_rng(seed)
    model, _ = load_model(base)
    parameters = {
        "rank": rank, "scale": 2.0, "dropout": 0.1,
        "keys": ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"],
    }  # fmt: skip
    linear_to_lora_layers(model, len(model.layers), parameters)
    names = [(n, w.shape) for n, w in tree_flatten(model.parameters()) if "lora_" in n]
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: mx.array(_matrix(rng, *shape)) for name, shape in names}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    stated = {
        "fine_tune_type": "lora", "num_layers": len(model.layers), "lora_parameters": parameters,
        **(config or {}),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(stated), "utf-8")
    return folder


def merge_mlx(folder: Path, base: Path, adapter: Path, scale: float = 1.0) -> Path:
    """Write a copy of the checkpoint `base` with `adapter` merged into its weights by mlx-lm's own
    fuse."""
    from mlx.utils import tree_unflatten
    from mlx_lm.utils import load_adapters, load_model, save_model

    shutil.copytree(base, folder)
    model = load_adapters(load_model(base)[0], str(adapter))
    for _, layer in model.named_modules():
        if "lora_a" in layer:
            layer.scale *= scale
    fused = [(name, layer.fuse()) for name, layer in model.named_modules() if "lora_a" in layer]
    model.update_modules(tree_unflatten(fused))
    save_model(folder, model)
    return folder
