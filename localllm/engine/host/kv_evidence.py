"""What quantised KV costs in precision on this model, measured once per model and build, and kept:
while nobody waits, where a plan uses quantised KV, or by `localllm doctor --kv`.

Users of 4-bit caches saw tool arguments break that an 8-bit cache left whole, on some models and
not on others: whether a type will do can be measured, so it is not guessed. A text like an agent's
(instructions, calls, code, figures) is read with the type and with f16, and the logits are compared
row by row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from localllm import json_store
from localllm_backends.contract import Backend, BackendFailure, KvComparison, KvFidelity

_EXACT = {"f32", "f16", "bf16"}
PAIRS = (("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))
# So much memory must be left over: two small contexts, with the rows of logits of a large
# vocabulary.
_SPARE_BYTES = 500 * 10**6
# Whoever just read an answer may well ask again: nothing is begun, or gone on with, before so long
# a rest.
REST_S = 10.0
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


def file_for(folder: Path, fingerprint: str) -> Path:
    """Where the figures of the model with that fingerprint are kept."""
    return folder / f"{fingerprint.partition('-')[0]}.json"


@dataclass(frozen=True, slots=True)
class Kept:
    """What a file says: the model's name, the pairs that were measured, and those that its engine
    can't have."""

    model: str = ""
    found: tuple[KvFidelity, ...] = ()
    without: tuple[tuple[str, str], ...] = ()


def read(file: Path, meaning: str | None = None) -> Kept:
    """What is kept in `file`; nothing from a damaged or missing one, or one of another build than
    `meaning`."""
    body = json_store.read(file)
    if meaning is not None and body.get("build") != meaning:
        return Kept()
    try:
        found = [json_store.record(KvFidelity, entry) for entry in body["found"]]
        without = tuple((str(k), str(v)) for k, v in body.get("without", ()))
        return Kept(
            str(body.get("model", "")), tuple(pair for pair in found if pair is not None), without
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return Kept()


def keep(file: Path, meaning: str, kept: Kept) -> None:
    """Write what was measured by the build `meaning`, where the disk takes it."""
    json_store.keep(file, {"build": meaning, **asdict(kept)})


class KvEvidence:
    """Measures what is not known yet, a piece at a time, and keeps it in `folder` (None: nothing is
    measured), where the `backend` has quantised KV: what a plan with f16 costs is known."""

    def __init__(self, backend: Backend, folder: str | None) -> None:
        quantised = {backend.info.kv_type_k, backend.info.kv_type_v} - _EXACT
        can_keep = backend.capabilities.compares_kv and folder is not None
        self._backend = backend if quantised and can_keep else None
        self._running: KvComparison | None = None
        self._kept = Kept()
        self._left: list[tuple[str, str]] = []
        if self._backend is None or folder is None:
            return
        info = backend.info
        self._file, self._meaning = file_for(Path(folder), info.fingerprint), info.kv_meaning
        self._kept = read(self._file, self._meaning)
        self._model = info.metadata.get("general.name", "") or info.description
        known = {*((f.k, f.v) for f in self._kept.found), *self._kept.without}
        able = set(backend.capabilities.kv_types)
        self._left = [pair for pair in PAIRS if pair not in known and able.issuperset(pair)]

    def tick(self, rested_s: float, spare_bytes: int | None) -> bool:
        """Compute one piece; True while there is more to measure now. Nobody has asked for anything
        for `rested_s`; `spare_bytes` of memory can be taken (None: unknown)."""
        if self._backend is None or not self._left or rested_s < REST_S:
            return False
        if spare_bytes is not None and spare_bytes < _SPARE_BYTES and self._running is None:
            return False
        try:
            if self._running is None:
                self._running = self._backend.compare_kv(
                    self._left, self._backend.tokenize(TEXT, special=False)
                )
            found = self._running.run()
        except BackendFailure:
            # there is nothing to compare with here: no type is known to be harmless
            self.close()
            self._left.clear()
            return False
        if found is None:
            return True
        self.close()
        measured = {(f.k, f.v) for f in found}
        without = (p for p in self._left if p not in measured)
        self._kept = Kept(self._model, (*self._kept.found, *found), (*self._kept.without, *without))
        self._left.clear()
        keep(self._file, self._meaning, self._kept)
        return False

    def snapshot(self) -> dict[str, float | int | str]:
        """What was found, by pair: mean divergence in nats and the share of other best tokens."""
        values: dict[str, float | int | str] = {}
        for f in self._kept.found:
            name = f.k if f.k == f.v else f"{f.k}_{f.v}"
            values |= {f"kv_divergence_{name}": f.mean_kl, f"kv_flips_{name}": f.flips}
        return values

    def close(self) -> None:
        """Free what a comparison under way has taken."""
        if self._running is not None:
            self._running.close()
            self._running = None
