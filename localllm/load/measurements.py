"""Measured speeds: this machine's own, written by `bench` and read by `recommend`, and those that
people pass on.

Others' figures (`bench --share`, `--import`) are kept beside one's own, never among them, and are
used for machines one names (`recommend --device`), and for this one as long as it has none of its
own. Such a file says whose machine and which build; it holds no paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localllm import json_store, paths
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.planner.speed import Measured
    from localllm_catalog.types import Model

KEEP = 64
# A file of figures that is passed on: its version, and what could be a speed at all.
FORMAT = 1
_MOST_BYTES = 4 * 2**20
_MOST_TOK_S = 1e6
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Record:
    """One run: `machine` is the Device's name, `model` a catalog id, `memory_bytes` what was really
    allocated.

    `depth` and `short_depth`: mean context of the two decode figures (`short_tok_s` 0: an older
    record without it). The last four: where the model lay, as in the planner's Placement (an older
    record: wholly on the accelerator).
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
    predicted_memory_bytes: int = 0
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
    """Every readable record, oldest first; a damaged or missing file is no record."""
    entries = json_store.read(file or path()).get("runs", [])
    found = (json_store.record(Record, entry) for entry in entries)
    return [record for record in found if record is not None and record.decode_tok_s > 0]


def keep(record: Record, file: Path | None = None) -> None:
    """Add `record`, replacing an earlier one of the same machine, variant, backend and settings;
    oldest go first."""
    target = file or path()

    def same(other: Record) -> bool:
        names = ("machine", "model", "quant", "backend", "kv_type", "n_ctx")
        return all(getattr(other, n) == getattr(record, n) for n in names)

    runs = [*[r for r in load(target) if not same(r)][-(KEEP - 1) :], record]
    json_store.write(target, {"runs": [asdict(r) for r in runs]})


def for_planner(
    records: list[Record], machine: str, models: Mapping[str, Model], *, where: str = "here"
) -> tuple[Measured, ...]:
    """The records of this machine whose model is known, in the planner's terms; `where` they were
    measured."""
    from localllm.planner.speed import Measured
    from localllm.planner.types import DEFAULT_BATCH
    from localllm_backends import registry
    from localllm_backends.placement import Placement
    from localllm_catalog.types import Variant

    found = []
    for r in records:
        model = _model_of(r, models) if r.machine == machine else None
        if model is None:
            continue
        known = next((v for v in model.variants if v.quant == r.quant), None)
        size = r.file_bytes or (known.file_bytes if known else 0)
        if not size:
            continue
        formats = registry.declared(r.backend).formats or ("gguf",)
        variant = Variant(formats[0], r.quant, "", (), size)  # type: ignore[arg-type]
        found.append(
            Measured(
                model,
                variant,
                r.backend,
                r.decode_tok_s,
                r.depth,
                r.kv_type,
                r.prefill_tok_s,
                r.prompt_tokens,
                r.date,
                r.short_tok_s,
                r.short_depth,
                where,
                Placement(
                    r.gpu_layers, r.experts_on_host, kv_on_host=r.kv_on_host, layout=r.layout
                ),
                r.n_ubatch or DEFAULT_BATCH,
            )
        )
    return tuple(found)


def _model_of(record: Record, models: Mapping[str, Model]) -> Model | None:
    """The record's model: from the catalog (a base model has its tuned sister's shapes), else from
    its file's header."""
    for name in (record.model, f"{record.model}-it", f"{record.model}-instruct"):
        if name in models:
            return models[name]
    if not record.file.endswith(".gguf") or not Path(record.file).exists():
        return None
    from localllm.errors import ModelFileError
    from localllm.library.catalog import read_model

    try:
        return read_model(record.file)
    except ModelFileError:
        return None


# -- figures that people pass on -------------------------------------------------------------------


def shared_path() -> Path:
    return path().with_name("shared_measurements.json")


def versions() -> dict[str, str]:
    """Versions of ours and of the engines here, by distribution: what a figure depends on beside
    the machine."""
    from importlib.metadata import PackageNotFoundError, version

    from localllm_backends import registry

    found = {}
    for name in ("localllm", *(package for d in registry.declarations() for package in d.packages)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def export(target: Path) -> int:
    """Write this machine's own figures to `target`, without file paths; how many. Raises UsageError
    if there are none."""
    own = [replace(record, file="") for record in load()]
    if not own:
        raise UsageError(
            "nothing has been measured here yet", hint="run `localllm bench MODEL` first"
        )
    body = {
        "localllm_speeds": FORMAT,
        "build": versions(),
        "runs": [asdict(record) for record in own],
    }
    try:
        target.write_text(json.dumps(body, indent=1), encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{target} can't be written: {e.strerror or e}") from e
    return len(own)


def take_in(source: Path) -> list[Record]:
    """Keep the figures of a file that somebody shared, beside our own; those kept.

    Raises UsageError where it is no such file, or holds nothing that could be a speed.
    """
    try:
        body = json_store.load(source, _MOST_BYTES)
    except (OSError, ValueError) as e:
        raise UsageError(f"{source} can't be read as a file of speeds: {e}") from e
    if not isinstance(body, dict) or body.get("localllm_speeds") != FORMAT:
        hint = "make one with `localllm bench --share FILE`"
        raise UsageError(f"{source} is no file of speeds, or one of another version", hint=hint)
    found = [replace(record, file="") for record in load(source) if _is_plausible(record)]
    if not found:
        raise UsageError(f"{source} holds no speed that can be used")
    for record in found:
        keep(record, shared_path())
    return found


def for_machine(machine: str, own: Sequence[Record]) -> list[Record]:
    """The records to plan `machine` with: its own, else those that others shared of such a
    machine."""
    mine = [record for record in own if record.machine == machine]
    return mine or [record for record in load(shared_path()) if record.machine == machine]


def _is_plausible(record: Record) -> bool:
    """Speeds between 0 and a million tokens/s, counts that are whole and not negative, names of
    ordinary length."""
    speeds = (record.decode_tok_s, record.prefill_tok_s, record.short_tok_s)
    counts = (
        record.depth,
        record.prompt_tokens,
        record.file_bytes,
        record.n_ctx,
        record.short_depth,
    )
    names = (
        record.machine,
        record.model,
        record.quant,
        record.backend,
        record.kv_type,
        record.date,
    )
    return (
        all(_is_number(x) and 0 <= x < _MOST_TOK_S for x in speeds)
        and all(isinstance(x, int) and x >= 0 for x in counts)
        and all(
            isinstance(x, str) and len(x) <= _MOST_CHARACTERS and x.isprintable() for x in names
        )
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
