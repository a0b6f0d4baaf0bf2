"""/lora-adapters of llama.cpp's server: the LoRA adapters that are loaded with a model, and their
scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm.errors import RequestError
from localllm.server.dialects.fields import LoraFields
from localllm.server.dialects.known import read
from localllm.server.models.router import ServedModel

_SCALES: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["id", "scale"],
        "properties": {"id": {"type": "integer"}, "scale": {"type": "number"}},
    },
}
# The body of POST /lora-adapters in the OpenAPI document.
BODY: dict[str, Any] = {
    "required": True,
    "content": {"application/json": {"schema": _SCALES}},
}


def adapters_of(model: ServedModel) -> list[dict[str, Any]]:
    """Return the body of GET /lora-adapters: each adapter with its scale in requests without
    `lora`."""
    scales: dict[int, float] = {}
    for number, adapter in enumerate(model.facts.adapters):
        scales[number] = adapter.scale
    chosen = model.defaults.adapters
    if chosen is None:
        chosen = model.worker.adapters
    if chosen is not None:
        scales = dict(chosen)
    # Only the file's name: a path would show the folders of this machine.
    return [
        {
            "id": number,
            "path": Path(adapter.path).name,
            "scale": scales.get(number, 0.0),
            "task_name": "",
            "prompt_prefix": "",
        }
        for number, adapter in enumerate(model.facts.adapters)
    ]


def scales_of(sent: list[Any], n_adapters: int) -> tuple[tuple[int, float], ...]:
    """Return the scales in the body of POST /lora-adapters, as (number, scale). Raises
    RequestError."""
    scales = []
    for entry in sent:
        if not isinstance(entry, dict):
            raise RequestError("the body must be a list of objects with id and scale")
        fields, _ = read(LoraFields, entry)
        if fields.id >= n_adapters:
            raise RequestError(
                f"there is no adapter {fields.id}: the model has {n_adapters} adapters", param="id"
            )
        scales.append((fields.id, fields.scale))
    return tuple(scales)
