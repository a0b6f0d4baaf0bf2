"""Speeds measured on this machine, written by `bench` and read by `recommend`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from localllm import json_store, paths
from localllm.errors import ModelFileError
from localllm.library.catalog import read_model
from localllm.planner.speed import Measured
from localllm.planner.types import DEFAULT_BATCH
from localllm_backends import registry
from localllm_backends.placement import Placement
from localllm_catalog.types import Model, Variant

MAX_RECORDS = 64


@dataclass(frozen=True, slots=True)
class Record:
    """One benchmark run.

    `machine`: the Device's name.
    `model`: a catalog id.
    `memory_bytes`: the memory that was actually allocated.
    `depth`, `short_depth`: mean context of the two decode speeds.
    `short_tok_s`: 0 in older records, which lack it.
    The last four fields describe the placement of the model, as in the planner's Placement. Older
    records lack them: the model was then entirely on the accelerator.
    """

    machine: str
    model: str
    quant: str
    backend: str
    decode_tok_s: float
    depth: int = 0
    kv_type: str = "f16"
    prefill_tok_s: float = 0.0
    prompt_tokens: int = 0
    file_bytes: int = 0
    n_ctx: int = 0
    slots: int = 0
    n_ubatch: int = 0
    memory_bytes: int = 0
    date: str = ""
    file: str = ""
    short_tok_s: float = 0.0
    short_depth: int = 0
    gpu_layers: int = -1
    experts_on_host: int = 0
    kv_on_host: bool = False
    layout: Literal["auto", "stored"] = "auto"


def path() -> Path:
    return paths.data_dir() / "measurements.json"


def load(file: Path | None = None) -> list[Record]:
    """Return all readable records, oldest first. A missing or damaged file counts as empty."""
    entries = json_store.entries(file or path(), "runs")
    records = (json_store.record(Record, entry) for entry in entries)
    return [record for record in records if record is not None and record.decode_tok_s > 0]


def keep(record: Record, file: Path | None = None) -> None:
    """Add `record`, and remove the oldest records above `MAX_RECORDS`.

    It replaces an earlier record of the same machine, variant, backend and settings.
    """
    target = file or path()

    def same_run(other: Record) -> bool:
        fields = ("machine", "model", "quant", "backend", "kv_type", "n_ctx")
        return all(getattr(other, n) == getattr(record, n) for n in fields)

    runs = [*[r for r in load(target) if not same_run(r)][-(MAX_RECORDS - 1) :], record]
    json_store.write(target, {"runs": [asdict(r) for r in runs]})


def for_planner(
    records: list[Record], machine: str, models: Mapping[str, Model]
) -> tuple[Measured, ...]:
    """Convert the records of this machine whose model is known to the planner's type."""
    figures = []
    for r in records:
        if r.machine != machine:
            continue
        model = _model_of(r, models)
        if model is None:
            continue
        file_bytes = r.file_bytes
        if not file_bytes:
            sizes = (v.file_bytes for v in model.variants if v.quant == r.quant)
            file_bytes = next(sizes, 0)
        if not file_bytes:
            continue
        formats = registry.declared(r.backend).formats or ("gguf",)
        variant = Variant(formats[0], r.quant, "", (), file_bytes)  # type: ignore[arg-type]
        figures.append(as_measured(r, model, variant))
    return tuple(figures)


def as_measured(record: Record, model: Model, variant: Variant) -> Measured:
    """Convert a record of this model and variant to the planner's type."""
    placement = Placement(
        record.gpu_layers,
        record.experts_on_host,
        kv_on_host=record.kv_on_host,
        layout=record.layout,
    )
    return Measured(
        model,
        variant,
        record.backend,
        record.decode_tok_s,
        record.depth,
        record.kv_type,
        record.prefill_tok_s,
        record.prompt_tokens,
        record.short_tok_s,
        record.short_depth,
        placement=placement,
        n_batch=record.n_ubatch or DEFAULT_BATCH,
    )


def _model_of(record: Record, models: Mapping[str, Model]) -> Model | None:
    """Find the record's model in the catalog, or else read its file's header.

    A base model has the same shapes as its instruction-tuned version.
    """
    for name in (record.model, f"{record.model}-it", f"{record.model}-instruct"):
        if name in models:
            return models[name]
    if not record.file.endswith(".gguf") or not Path(record.file).exists():
        return None
    try:
        return read_model(record.file)
    except ModelFileError:
        return None
