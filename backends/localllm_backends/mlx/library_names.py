"""The names of mlx-lm and mlx-vlm that this package uses, by feature.

Both libraries change weekly, and most of these names are not documented. A release without one of a
feature's names lacks only that feature. This program prints the names that are gone:

    python -m localllm_backends.mlx.library_names
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator

from localllm_backends.mlx.towers import FAMILIES

# A name in parentheses is a parameter of the function before it.
_NAMES = {
    "text generation": """
        mlx_lm.models.cache.ArraysCache mlx_lm.models.cache.CacheList mlx_lm.models.cache.KVCache
        mlx_lm.models.cache.make_prompt_cache mlx_lm.utils.get_total_parameters
        mlx_lm.utils.load_model(lazy) mlx_lm.utils.load_tokenizer
    """,
    "attention over shared prefixes": """
        mlx_lm.models.base.scaled_dot_product_attention(cache)
    """,
    "TurboQuant": """
        mlx_vlm.turboquant.DEFAULT_TURBOQUANT_SEED mlx_vlm.turboquant.TurboQuantMSEState
        mlx_vlm.turboquant._TurboQuantMSECodec
    """,
    "LoRA adapters": "mlx_lm.utils.load_adapters",
    "quants": "mlx_lm.convert.convert",
    "draft heads": """
        mlx_lm.models.base.create_attention_mask mlx_lm.utils.load_model(get_model_classes)
    """,
    "trained drafters": """
        mlx_lm.models.rope_utils.initialize_rope
        mlx_vlm.speculative.drafters.dflash2.Model mlx_vlm.speculative.drafters.dflash2.ModelConfig
        mlx_vlm.speculative.drafters.dspark.Model mlx_vlm.speculative.drafters.dspark.ModelConfig
        mlx_vlm.speculative.drafters.eagle3.Eagle3DraftModel
        mlx_vlm.speculative.drafters.eagle3.ModelConfig
        mlx_vlm.speculative.drafters.qwen3_dflash.Model
        mlx_vlm.speculative.drafters.qwen3_dflash.ModelConfig
    """,
    "DSpark for Gemma 4": """
        mlx_vlm.speculative.drafters.gemma4_dspark.Model
        mlx_vlm.speculative.drafters.gemma4_dspark.ModelConfig
    """,
    "images": "mlx_vlm.models.rope_utils.MRoPERotaryEmbedding mlx_vlm.utils.load_model(lazy)",
}


def names() -> dict[str, list[str]]:
    """Return the names of each feature: `module.name`, or `module.function(parameter)`."""
    found = {feature: text.split() for feature, text in _NAMES.items()}
    for family in FAMILIES.values():
        module = f"mlx_vlm.models.{family.module}.processing_{family.module}"
        found["images"].append(f"{module}.{family.processor}")
    return found


def missing_names() -> dict[str, list[str]]:
    """Return the names that the installed releases lack, by feature. Features without any are left
    out.

    A library that is not installed lacks no names.
    """
    missing = {feature: list(_missing(wanted)) for feature, wanted in names().items()}
    return {feature: lacks for feature, lacks in missing.items() if lacks}


def _missing(wanted: list[str]) -> Iterator[str]:
    for name in wanted:
        installed = importlib.util.find_spec(name.partition(".")[0]) is not None
        if installed and not _exists(name):
            yield name


def _exists(name: str) -> bool:
    path, _, parameter = name.rstrip(")").partition("(")
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return False
    return not parameter or parameter in inspect.signature(found).parameters


if __name__ == "__main__":
    lacking = missing_names()
    for feature_title, lacks in lacking.items():
        print(f"{feature_title}: {', '.join(lacks)}")
    sys.exit(bool(lacking))
