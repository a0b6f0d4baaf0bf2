"""Precision loss of quantised KV types, measured and stored once per model and build.

`localllm doctor --kv` measures it, and the planner uses it.

Users reported that a 4-bit cache broke tool arguments that an 8-bit cache preserved. Only some
models were affected, so we measure instead of guessing. The model reads an agent-like text
(instructions, calls, code, numbers) once with the KV type and once with f16. The logits are
compared row by row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from localllm import json_store
from localllm_backends.contract import KvFidelity
from localllm_backends.declaration import Declaration

PAIRS = (("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))
_MLX_TYPES = ("q8_0", "q6_0", "q5_0", "q4_0", "q3_0", "turbo4", "turbo3")
TEXT = """You are a careful coding agent. Use the tools to read before you write, and answer in one sentence.
User: The totals in report.pyx are wrong since Tuesday: invoice 20417 shows 1,308.50 instead of 13,085.00. Find out why.
{"name": "search", "arguments": {"pattern": "def total\\\\(", "path": "src/report.pyx", "max_results": 20}}
src/report.pyx:41: def total(rows: list[Row], *, rate: float = 0.19) -> Decimal:
{"name": "read_file", "arguments": {"path": "src/report.pyx", "start_line": 38, "end_line": 52}}
def total(rows: list[Row], *, rate: float = 0.19) -> Decimal:
    amount = Decimal(0)
    for row in rows:
        if row.kind == "refund":
            amount -= row.net * (1 + Decimal(rate))
        else:
            amount += row.net * (1 + Decimal(rate)) / 10
    return amount.quantize(Decimal("0.01"))
The division by ten in line 45 is what makes every invoice too small; refunds are left whole, so they look too large.
{"name": "edit", "arguments": {"path": "src/report.pyx", "old": "(1 + Decimal(rate)) / 10", "new": "(1 + Decimal(rate))"}}
{"ok": true, "changed_lines": [45], "sha256": "9f2c61d0a47b"}
{"name": "run", "arguments": {"command": "pytest -q tests/test_report.pyx", "timeout_s": 120}}
.......                                                                  [100%]
7 passed in 0.84s
The total divided every line by ten; I removed that, and the seven tests of the report pass. Invoice 20417 is 13,085.00 again.
"""


def pairs_of(backend: Declaration) -> tuple[tuple[str, str], ...]:
    """Return the pairs of KV types to measure with this backend."""
    if backend.kv_quants == "groups":
        return tuple((kind, kind) for kind in _MLX_TYPES)
    return PAIRS


def file_for(folder: Path, fingerprint: str) -> Path:
    """Path of the measurements for the model with this fingerprint."""
    return folder / f"{fingerprint.partition('-')[0]}.json"


@dataclass(frozen=True, slots=True)
class KvEvidence:
    """Contents of a file: the model's name, and the measured pairs of KV types."""

    model: str = ""
    found: tuple[KvFidelity, ...] = ()


def read(file: Path, build: str | None = None) -> KvEvidence:
    """Read the measurements in `file`.

    Returns an empty KvEvidence if the file is missing or damaged, or if `build` is given and names
    another build.
    """
    body = json_store.read(file)
    if build is not None and body.get("build") != build:
        return KvEvidence()
    try:
        entries = [json_store.record(KvFidelity, entry) for entry in body["found"]]
        pairs = tuple(pair for pair in entries if pair is not None)
        return KvEvidence(str(body.get("model", "")), pairs)
    except (ValueError, KeyError, TypeError, AttributeError):
        return KvEvidence()


def keep(file: Path, build: str, evidence: KvEvidence) -> None:
    """Store the measurements of `build`. Disk errors are ignored."""
    json_store.keep(file, {"build": build, **asdict(evidence)})
