"""Write a quant of an MLX or Hugging Face folder with mlx-lm's converter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localllm_backends.contract import LoadError, QuantizeOrder
from localllm_backends.mlx.files import check_folder
from localllm_backends.mlx.vocabulary import read_json

_AFFINE = re.compile(r"([2-8])bit(?:-g(32|64|128))?")
_MODES = ("mxfp4", "mxfp8", "nvfp4")
_USUAL_GROUP = 64
# Where the result's config.json names its source.
_FACTS_KEY = "localllm_quantize"


def quantize(order: QuantizeOrder, on_planned: Callable[[int], None]) -> None:
    """Write the quant of `order` to a new folder. Raises LoadError with mlx-lm's reason."""
    folder = check_folder(order.source)
    config = read_json(folder / "config.json")
    if config.get("quantization") or config.get("quantization_config"):
        raise LoadError(
            f"{folder.name} is already quantised, and mlx-lm quantises only plain weights",
            "use the model's own folder in bfloat16 or float16",
        )
    if order.imatrix:
        raise LoadError(
            "MLX quants use no importance matrix", "leave out --imatrix, or quantise a GGUF file"
        )
    how = _parameters(order.quant)
    # Imported last: it imports transformers, which takes seconds.
    from mlx_lm.convert import convert

    on_planned(0)
    try:
        convert(str(folder), order.target, quantize=True, **how)
    except Exception as e:  # mlx-lm and its libraries raise errors of many kinds
        raise LoadError(f"mlx-lm can't quantise {folder.name}: {e}") from e
    _add_facts(Path(order.target) / "config.json", dict(order.facts))


def _parameters(quant: str) -> dict[str, Any]:
    """Return mlx-lm's parameters of a quant ("4bit", "4bit-g32", "mxfp4")."""
    if quant in _MODES:
        return {"q_mode": quant}
    match = _AFFINE.fullmatch(quant)
    if match is None or match[1] == "7":
        known = ", ".join(("2bit to 6bit, 8bit (with -g32 or -g128: other groups)", *_MODES))
        raise LoadError(f"mlx-lm writes no quant {quant[:40]!r}", f"it writes {known}")
    return {"q_bits": int(match[1]), "q_group_size": int(match[2] or _USUAL_GROUP)}


def _add_facts(config_file: Path, facts: dict[str, Any]) -> None:
    config = read_json(config_file)
    config[_FACTS_KEY] = facts
    config_file.write_text(json.dumps(config, indent=4), encoding="utf-8")
