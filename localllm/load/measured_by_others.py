"""Speeds that others measured on machines like this one (`bench --share`), for plans.

`catalog update` reads them from the file that the setting `measured_rows` names: a line of JSON for
each measurement, with the `source` that it came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from localllm import json_store, paths
from localllm.device.types import Device
from localllm.foreign_json import MalformedError, parse
from localllm.load import measurements
from localllm.planner.speed import Measured, decode_bound
from localllm_backends import registry
from localllm_catalog.errors import CatalogError
from localllm_catalog.types import Model

_MAX_ROWS = 20_000
_MAX_CHARS = 4096
_MIN_TOK_S = 1e-3
_MAX_TOK_S = 1e7
# Tokens, layers and bytes above these are not those of a run.
_MAX_TOKENS = 2**24
_MAX_BYTES = 2**50
# Two machines of one kind report sizes of their memory that differ by what the firmware takes.
_SAME_MEMORY = 0.1
# A figure above the roofline by more than the error of the known bandwidth is wrong.
_OVER_ROOFLINE = 1.1


@dataclass(frozen=True, slots=True)
class SharedRow:
    """One measurement of `bench --share`, and who published it (`source`).

    `match`: name of the row of devices.toml. `depth`, `short_depth`: mean context of the two decode
    speeds. Raises ValueError for figures that no measurement gives.
    """

    source: str
    device: str
    device_memory_bytes: int
    model: str
    quant: str
    backend: str
    file_bytes: int
    decode_tok_s: float
    depth: int
    match: str = ""
    short_tok_s: float = 0.0
    short_depth: int = 0
    prefill_tok_s: float = 0.0
    prompt_tokens: int = 0
    kv_type: str = "f16"
    n_batch: int = 0
    gpu_layers: int = -1
    experts_on_host: int = 0

    def __post_init__(self) -> None:
        rates = [self.decode_tok_s]
        # 0: not measured.
        rates += [rate for rate in (self.short_tok_s, self.prefill_tok_s) if rate != 0]
        counts = (self.depth, self.short_depth, self.prompt_tokens, self.n_batch)
        layers = (self.gpu_layers + 1, self.experts_on_host)
        sizes = (self.file_bytes, self.device_memory_bytes)
        if not all(_MIN_TOK_S < rate < _MAX_TOK_S for rate in rates):
            raise ValueError("a speed is not that of a measurement")
        if not all(0 <= count < _MAX_TOKENS for count in (*counts, *layers)):
            raise ValueError("a number of tokens or layers is not that of a measurement")
        if not all(0 < size < _MAX_BYTES for size in sizes):
            raise ValueError("a size is not that of a measurement")
        if not self.source or self.backend not in registry.backends():
            raise ValueError("its source or its engine is unknown")


def rows_of(text: bytes) -> tuple[list[SharedRow], int]:
    """Return the usable rows of a file, at most `_MAX_ROWS`, and the number of its other lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    rows = []
    for line in lines[:_MAX_ROWS]:
        try:
            row = json_store.record(SharedRow, parse(line, _MAX_CHARS).value)
        except MalformedError:
            continue
        if row is not None:
            rows.append(row)
    return rows, len(lines) - len(rows)


def write(rows: Iterable[SharedRow]) -> Path:
    """Store `rows` in place of those of an earlier update. Raises OSError."""
    target = paths.shared_rows_file()
    json_store.write(target, {"rows": [asdict(row) for row in rows]})
    return target


def read(device: Device) -> list[SharedRow]:
    """Return the stored rows of machines like `device`. A missing or damaged file counts as
    empty."""
    rows = []
    for entry in json_store.entries(paths.shared_rows_file(), "rows"):
        # Most rows are of other machines, and checking a row takes longer than comparing names.
        if not isinstance(entry, dict) or not _has_name(entry, device):
            continue
        row = json_store.record(SharedRow, entry)
        if row is not None and _has_memory(row, device):
            rows.append(row)
    return rows


def for_planner(device: Device, models: Mapping[str, Model]) -> tuple[Measured, ...]:
    """Return the stored figures of machines like `device`, without those that its memory could not
    deliver."""
    figures = []
    for row in read(device):
        record = measurements.Record(
            machine=device.name,
            model=row.model,
            quant=row.quant,
            backend=row.backend,
            decode_tok_s=row.decode_tok_s,
            depth=row.depth,
            kv_type=row.kv_type,
            prefill_tok_s=row.prefill_tok_s,
            prompt_tokens=row.prompt_tokens,
            file_bytes=row.file_bytes,
        )
        record = replace(
            record,
            n_ubatch=row.n_batch,
            short_tok_s=row.short_tok_s,
            short_depth=row.short_depth,
            gpu_layers=row.gpu_layers,
            experts_on_host=row.experts_on_host,
        )
        for measured in measurements.for_planner([record], device.name, models):
            if _is_possible(device, measured):
                figures.append(replace(measured, source=row.source))
    return tuple(figures)


def _has_name(entry: Mapping[str, Any], device: Device) -> bool:
    if device.match and entry.get("match") == device.match:
        return True
    return entry.get("device") == device.name


def _has_memory(row: SharedRow, device: Device) -> bool:
    ratio = row.device_memory_bytes / max(1, device.memory.total_bytes)
    return abs(math.log(ratio)) < _SAME_MEMORY


def _is_possible(device: Device, measured: Measured) -> bool:
    """True if the engine has this quant and KV type, and no figure is above the roofline. A model
    partly in system memory is below it."""
    for depth, rate in measured.decoded:
        try:
            bound = decode_bound(
                device, measured.model, measured.variant, depth=depth, kv_type=measured.kv_type
            )
        except CatalogError:
            return False
        if rate > _OVER_ROOFLINE * bound:
            return False
    return True
