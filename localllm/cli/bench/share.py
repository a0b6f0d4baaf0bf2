"""`localllm bench --share`: one measurement as a row that others can use. It has no name and no
path."""

from __future__ import annotations

import json
from typing import Any

from localllm import __version__
from localllm.device.detect import detect
from localllm.errors import UsageError
from localllm.library.store import published_digest
from localllm.load.engine_title import engine_title
from localllm.load.load_plan import LoadPlan
from localllm.planner.types import Plan
from localllm_backends import registry

HOW_TO_SHARE = (
    "this row is not sent anywhere: to share it, put it into a new issue of the project, form "
    "'A measured speed'"
)
_FIGURE_NAMES = (
    "decode_tok_s", "depth", "short_tok_s", "short_depth", "prefill_tok_s", "prompt_tokens",
    "memory_bytes", "rounds",
)  # fmt: skip


def check_shareable(load: LoadPlan) -> Plan:
    """The plan of the model, before anything is measured. Raises UsageError if the planner does not
    know the model, or if the run is slowed down."""
    if load.plan is None:
        raise UsageError(
            "this model has no plan, so its speed can't be compared by others",
            hint="share the speed of a model that `localllm models list` plans",
        )
    if load.options.engine.get("power", 1.0) != 1.0:
        raise UsageError(
            "this run is slowed down by --power, so it is no measure of this machine",
            hint="measure again without --power",
        )
    return load.plan


def row(load: LoadPlan, figures: dict[str, Any]) -> dict[str, Any]:
    """The row of a run: device, model, file, engine, settings and figures. Raises UsageError as
    `check_shareable` does."""
    plan = check_shareable(load)
    device = detect(measure=True)
    variant = plan.variant
    settings = plan.settings
    fields: dict[str, Any] = {
        "device": device.name,
        "match": device.match,
        "accelerator": device.accelerator,
        "device_memory_bytes": device.memory.total_bytes,
        "model": plan.model.id,
        "quant": variant.quant,
        "file_bytes": variant.file_bytes,
        "file_sha256": published_digest(load.local, load.local.path) or None,
    }
    fields |= {
        "backend": plan.backend,
        "engine": engine_title(registry.declared(plan.backend)),
        "localllm": __version__,
        "n_ctx": settings.n_ctx,
        "n_batch": settings.n_batch,
        "slots": settings.slots,
        "kv_type": settings.kv_type,
        "gpu_layers": settings.placement.gpu_layers,
        "experts_on_host": settings.placement.experts_on_host,
    }
    fields["how"] = "localllm bench: the median of three rounds, or the second fastest of more"
    fields.update({name: _four_digits(figures[name]) for name in _FIGURE_NAMES})
    return fields


def line(fields: dict[str, Any]) -> str:
    """The row as one line of JSON."""
    return json.dumps(fields, ensure_ascii=False)


def _four_digits(value: float) -> float:
    if isinstance(value, int):
        return value
    return float(f"{value:.4g}")
