"""Find the catalog's model of a name in Ollama's library: `llama3.3:70b`, `qwen3:30b-a3b-q4_K_M`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from localllm.library import names

if TYPE_CHECKING:
    from localllm_catalog.catalog import Catalog
    from localllm_catalog.types import Model

# Words that one of the two names has and the other lacks.
_FILLERS = {"instruct", "it", "chat", "text", "latest"}
# The size, and the size of a mixture's active experts: "30b", "30b-a3b".
_SIZE = r"[0-9]+(?:\.[0-9]+)?b"
_ACTIVE = r"a[0-9]+(?:\.[0-9]+)?b"
# Ollama's names without the model that was distilled into.
_DISTILLED = {
    "1.5b": "deepseek-r1-distill-qwen-1.5b",
    "7b": "deepseek-r1-distill-qwen-7b",
    "8b": "deepseek-r1-0528-qwen3-8b",
    "14b": "deepseek-r1-distill-qwen-14b",
    "32b": "deepseek-r1-distill-qwen-32b",
    "70b": "deepseek-r1-distill-llama-70b",
}


def find(name: str, tag: str, catalog: Catalog) -> tuple[Model, str] | None:
    """Return the catalog model that Ollama calls `name:tag`, and the quant in the tag ("" if none).

    A tag may lack the active size (`qwen3:30b` is qwen3-30b-a3b), and a name may lack its only size
    (`llama3.3`). Returns None if no model, or more than one, has this name.
    """
    quant = names.quant_of(tag)
    size = re.sub(r"[-_]?(?:q[0-9]\w*|fp?16|bf16|mxfp4)$", "", tag.lower())
    if name.lower() == "deepseek-r1" and size in _DISTILLED:
        model = catalog.get(_DISTILLED[size])
        return None if model is None else (model, quant)
    wanted = _joined(f"{name}-{size}")
    endings = ["", _ACTIVE]
    if not size:
        endings += [_SIZE, f"{_SIZE}-{_ACTIVE}"]
    for ending in endings:
        found = [model for model in catalog.models if _is_named(model.id, wanted, ending)]
        if len(found) == 1:
            return found[0], quant
        if found:
            return None
    return None


def _joined(name: str) -> str:
    """Return the words of a name without fillers and punctuation, except the dots of versions."""
    words = [word for word in name.lower().split("-") if word not in _FILLERS]
    return "".join(words)


def _is_named(model_id: str, wanted: str, ending: str) -> bool:
    """Return True if the id is the `wanted` name, followed by words that `ending` matches."""
    words = [word for word in model_id.split("-") if word not in _FILLERS]
    divided = [("".join(words[:n]), "-".join(words[n:])) for n in range(1, len(words) + 1)]
    return any(start == wanted and re.fullmatch(ending, rest) for start, rest in divided)
