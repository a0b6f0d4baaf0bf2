"""Read an upstream's list of models: only the fields that are used, each of its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.foreign_json import JsonPart

# The fields of a listed model that are used, with their JSON types.
_FIELDS: Mapping[str, type] = {
    "id": str, "created": int, "context_length": int, "max_model_len": int, "capabilities": list,
    "architecture": dict, "status": dict, "meta": dict,
}  # fmt: skip


def listed(answer: JsonPart) -> list[dict[str, Any]]:
    """The models in an upstream's list. Fields of the wrong type are left out, and models without a
    name. Raises MalformedError if there is no list."""
    data = answer.get("data")
    if data.value is None:
        raise data.wrong("a list")
    found = []
    for entry in data.items():
        known = entry.cleaned()
        if isinstance(known, dict) and known.get("id"):
            fields = {k: known[k] for k, kind in _FIELDS.items() if isinstance(known.get(k), kind)}
            if "id" in fields:
                found.append(fields)
    return found
