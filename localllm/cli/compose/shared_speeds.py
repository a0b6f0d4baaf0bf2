"""Measured speeds as a file that people pass on: what `bench --share` writes and `bench --import` takes in.

CpuContention' figures are kept beside one's own, never among them, and are used for machines one names (`recommend --device`),
and for this one as long as it has none of its own. The file says whose machine and which build; it holds no paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from localllm.cli.compose import measurements
from localllm.cli.compose.measurements import Record
from localllm.errors import UsageError

FORMAT = 1
_MOST_BYTES = 4 * 2**20
_MOST_TOK_S = 1e6
_MOST_CHARACTERS = 200


def path() -> Path:
    """The file others' figures are kept in."""
    return measurements.path().with_name("shared_measurements.json")


def build() -> dict[str, str]:
    """Versions of ours and of the engines here, by distribution: what a figure depends on beside the machine."""
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
    """Write this machine's own figures to `target`, without file paths; how many. Raises UsageError if there are none."""
    own = [replace(record, file="") for record in measurements.load()]
    if not own:
        raise UsageError("nothing has been measured here yet", hint="run `localllm bench MODEL` first")
    body = {"localllm_speeds": FORMAT, "build": build(), "runs": [asdict(record) for record in own]}
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
        if source.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{source} is too large for a file of speeds")
        body = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"{source} can't be read as a file of speeds: {e}") from e
    if not isinstance(body, dict) or body.get("localllm_speeds") != FORMAT:
        hint = "make one with `localllm bench --share FILE`"
        raise UsageError(f"{source} is no file of speeds, or one of another version", hint=hint)
    found = [replace(record, file="") for record in measurements.load(source) if _is_plausible(record)]
    if not found:
        raise UsageError(f"{source} holds no speed that can be used")
    for record in found:
        measurements.keep(record, path())
    return found


def for_machine(machine: str, own: Sequence[Record]) -> list[Record]:
    """The records to plan `machine` with: its own, else those that others shared of such a machine."""
    mine = [record for record in own if record.machine == machine]
    return mine or [record for record in measurements.load(path()) if record.machine == machine]


def _is_plausible(record: Record) -> bool:
    """Speeds between 0 and a million tokens/s, counts that are whole and not negative, names of ordinary length."""
    speeds = (record.decode_tok_s, record.prefill_tok_s, record.short_tok_s)
    counts = (record.depth, record.prompt_tokens, record.file_bytes, record.n_ctx, record.short_depth)
    names = (record.machine, record.model, record.quant, record.backend, record.kv_type, record.date)
    return (
        all(_is_number(x) and 0 <= x < _MOST_TOK_S for x in speeds)
        and all(isinstance(x, int) and x >= 0 for x in counts)
        and all(isinstance(x, str) and len(x) <= _MOST_CHARACTERS and x.isprintable() for x in names)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
