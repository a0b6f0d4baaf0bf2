"""Drafters for one model in a separate folder, on MLX: EAGLE-3, DFlash, DFlash2 and DSpark.

mlx-vlm defines their layers and how they are stored. Here they are checked against the model, and
run with our memory, so their KV is cut, forked, stored and batched like the model's.

They read the model's features: outputs of some of its layers for each token, taken during the
model's own step. As on llama.cpp, a token's features are read at the position of the next token.
Rotary attention depends on distances only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm_backends.contract import LoadError
from localllm_backends.drafter_config import DrafterConfig, drafter_config
from localllm_backends.mlx.draft_target import Target
from localllm_backends.mlx.files import check_folder
from localllm_backends.mlx.vocabulary import read_json

if TYPE_CHECKING:
    from localllm_backends.mlx.draft_heads import DraftModule

_LONGEST_BLOCK = 64


def read_drafter(path: str, model: Any, config: Mapping[str, Any]) -> DraftModule:
    """Return the drafter in the folder at `path`, without reading its weights.

    Raises LoadError if it does not fit this model or can't run here.
    """
    folder = check_folder(path)
    raw = read_json(folder / "config.json")
    drafter = drafter_config(raw)
    if drafter is None:
        raise _refused(folder, "its config.json describes no drafter of a kind that runs on MLX")
    if raw.get("model_file") is not None:
        raise _refused(folder, "it needs its own Python code, and localllm does not run that")
    if importlib.util.find_spec("mlx_vlm") is None:
        raise _refused(folder, "mlx-vlm is not installed: run `pip install 'localllm[vision]'`")
    target = Target(model, config)
    reason = _why_unfit(drafter, target)
    if not reason and drafter.kind == "dflash":
        reason = _why_block_unfit(drafter)
    if reason:
        raise _refused(folder, reason)
    try:
        return _drafter_module(folder, raw, drafter, target)
    except Exception as e:
        raise _refused(folder, f"it can't be read: {str(e).strip()[:300]}") from e


def _drafter_module(
    folder: Path, raw: dict[str, Any], drafter: DrafterConfig, target: Target
) -> DraftModule:
    if drafter.kind == "eagle3":
        from localllm_backends.mlx.eagle3 import eagle3_module

        return eagle3_module(folder, raw, drafter, target)
    from localllm_backends.mlx.dflash import dflash_module

    return dflash_module(folder, drafter, target)


def _refused(folder: Path, why: str) -> LoadError:
    return LoadError(
        f"{folder.name!r} can't draft for this model: {why}",
        "use the drafter that was published for this model, or `--draft auto`",
    )


def _why_unfit(drafter: DrafterConfig, target: Target) -> str:
    """Return why the drafter can't draft for the model; "" if it can."""
    if not target.layers or target.embeddings is None or target.output is None:
        return f"mlx-lm's {target.family!r} models don't give the outputs of their layers"
    if drafter.width != target.width:
        return (
            f"it was trained for a model with hidden size {drafter.width:,}, and "
            f"this model has {target.width:,}"
        )
    if drafter.vocabulary != target.vocabulary:
        return (
            f"its vocabulary has {drafter.vocabulary:,} tokens, and the model's vocabulary has "
            f"{target.vocabulary:,}"
        )
    n = len(target.layers)
    if drafter.layers and (min(drafter.layers) < 0 or max(drafter.layers) >= n):
        listed = ", ".join(str(layer) for layer in drafter.layers)
        return f"it reads the outputs of layers {listed}, and this model has {n} layers"
    return ""


def _why_block_unfit(drafter: DrafterConfig) -> str:
    """Return why a block of tokens can't be drafted; "" if it can."""
    if not drafter.layers:
        return "its config.json names no layers to read"
    if not 2 <= drafter.block <= _LONGEST_BLOCK:
        return f"its block of {drafter.block} tokens is not supported"
    return ""
