"""What quants lose, measured on this machine: written by `quality`, read by the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from localllm import json_store, paths
from localllm_catalog.types import Model

_MAX_LOSSES = 256
# A measurement with a larger error (nats) says less than the published losses do.
_MAX_ERROR_NATS = 0.02


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """ln(perplexity / perplexity of the reference) of a file, and its standard error, in nats.

    `model`: a catalog id. `reference`: the quant of the file that it was compared with.
    """

    model: str
    quant: str
    ln_ratio: float
    error: float
    reference: str = ""
    date: str = ""


def losses_file() -> Path:
    return paths.data_dir() / "losses.json"


def read_losses() -> list[MeasuredLoss]:
    """Return all readable losses, oldest first. A missing or damaged file counts as empty."""
    entries = json_store.entries(losses_file(), "losses")
    records = (json_store.record(MeasuredLoss, entry) for entry in entries)
    return [loss for loss in records if loss is not None]


def keep_loss(loss: MeasuredLoss) -> bool:
    """Store `loss` in place of an earlier one of the same quant, unless its error is too large.
    Return whether it was stored."""
    if not loss.error <= _MAX_ERROR_NATS:
        return False
    name = loss.model, loss.quant
    others = [other for other in read_losses() if (other.model, other.quant) != name]
    losses = [*others[-(_MAX_LOSSES - 1) :], loss]
    json_store.write(losses_file(), {"losses": [asdict(entry) for entry in losses]})
    return True


def with_losses(models: Sequence[Model]) -> tuple[Model, ...]:
    """`models` with the losses that were measured here."""
    ln_ratios = {(loss.model, loss.quant): loss.ln_ratio for loss in read_losses()}
    if not ln_ratios:
        return tuple(models)
    with_ratios = []
    for model in models:
        variants = tuple(
            replace(variant, measured_ln_ratio=ln_ratios.get((model.id, variant.quant)))
            for variant in model.variants
        )
        with_ratios.append(replace(model, variants=variants))
    return tuple(with_ratios)
