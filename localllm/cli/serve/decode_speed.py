"""Detect whether a model is slower than at its last start here, for instance after an update."""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm import json_store, paths
from localllm.server.models.router import ModelRouter
from localllm.server.models.worker import ModelWorker

# The factor of the time per step if the speed falls by a fifth.
SLOWER_RATIO = 1.25
_MAX_MODELS = 64
# Depths within an eighth of an octave are compared with each other. Below `_LINEAR_UNTIL_TOKENS`,
# the bins have a width of `_LINEAR_BIN_TOKENS`.
_LINEAR_BIN_TOKENS = 128
_LINEAR_UNTIL_TOKENS = 1024
_BINS_PER_OCTAVE = 8
INTERVAL_S = 5.0
# Number of time spans needed for a comparison (localllm/engine/metrics.py keeps eight).
_MIN_SPANS = 6


@dataclass(frozen=True, slots=True)
class UsualSpeed:
    """The reference for a model's next start.

    `steps`: seconds per decode step without drafts, by depth (grouped by `depth_bin`).
    `slower`: the last start was slower, so `steps` are from earlier starts.
    """

    steps: dict[str, float]
    slower: bool = False


def path() -> Path:
    return paths.data_dir() / "decode_speeds.json"


def depth_bin(depth: int) -> str:
    """Return the bin of a depth: depths in one bin are compared with each other."""
    if depth < _LINEAR_UNTIL_TOKENS:
        return str(depth // _LINEAR_BIN_TOKENS * _LINEAR_BIN_TOKENS)
    octaves = math.log2(depth / _LINEAR_UNTIL_TOKENS)
    bin_octaves = math.floor(octaves * _BINS_PER_OCTAVE) / _BINS_PER_OCTAVE
    return str(round(_LINEAR_UNTIL_TOKENS * 2**bin_octaves))


def steps_of(spans: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the seconds per step by depth, from the spans of a worker.

    It takes the lower median of each depth, because interference can only slow a step down.
    """
    values_by_depth: dict[str, list[float]] = {}
    for depth, step_s in spans:
        values_by_depth.setdefault(depth_bin(int(depth)), []).append(step_s)
    return {depth: statistics.median_low(values) for depth, values in values_by_depth.items()}


def slowdown_text(model: str, steps: Mapping[str, float], usual: Mapping[str, float]) -> str:
    """Return a warning if a model is slower by a fifth or more, else "".

    The comparison is the median over the depths that both starts have.
    """
    ratios = {depth: steps[depth] / usual[depth] for depth in steps.keys() & usual.keys()}
    if not ratios:
        return ""
    depths = sorted(ratios, key=ratios.__getitem__)
    median_depth = depths[(len(depths) - 1) // 2]
    if steps[median_depth] < SLOWER_RATIO * usual[median_depth]:
        return ""
    tok_s = 1 / steps[median_depth]
    usual_tok_s = 1 / usual[median_depth]
    return (
        f"{model} is slower than before on this machine: {tok_s:.3g} tok/s instead of the "
        f"usual {usual_tok_s:.3g}"
    )


def load() -> dict[str, UsualSpeed]:
    """Return the usual speed of every model by its key. A missing or damaged file counts as
    empty."""
    speeds = {}
    for key, entry in json_store.read(path()).items():
        speed = json_store.record(UsualSpeed, entry)
        if speed is None:
            continue
        if all(
            isinstance(step_s, float) and 0 < step_s < math.inf for step_s in speed.steps.values()
        ):
            speeds[key] = speed
    return speeds


def compare_and_store(key: str, model: str, steps: Mapping[str, float]) -> str:
    """Compare a start with the previous one. Returns the warning, or "".

    The new `steps` become the reference. But the first time they are slower, the old reference is
    kept for the next start.
    """
    speeds = load()
    usual = speeds.pop(key, UsualSpeed({}))
    text = slowdown_text(model, steps, usual.steps)
    if text and not usual.slower:
        speeds[key] = UsualSpeed(usual.steps, slower=True)
    else:
        speeds[key] = UsualSpeed({**usual.steps, **steps})
    latest = list(speeds.items())[-_MAX_MODELS:]
    json_store.keep(path(), {key: asdict(speed) for key, speed in latest})
    return text


class DecodeSpeedWatch:
    """Compares each start of a model of `router` with the previous start, after a few decode steps.

    `report` is called with the warning for a slower start.
    """

    def __init__(self, router: ModelRouter, report: Callable[[str], None]) -> None:
        self._router = router
        self._report = report
        self._compared: dict[str, Any] = {}
        self._used_s: dict[str, float] = {}

    @property
    def compared(self) -> bool:
        """True if the start of a model was compared and the model is still loaded."""
        return bool(self._compared)

    async def run(self) -> None:
        """Check at intervals until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Compare the starts that have enough data. Each start is compared once."""
        for worker in self._router.workers():
            if not worker.loaded:
                self._compared.pop(worker.name, None)
                continue
            client = getattr(worker.host, "client", None)
            if client is None or self._compared.get(worker.name) is client:
                continue
            # Don't wake a model that was not used since the last check.
            if self._used_s.get(worker.name) == worker.last_used_s:
                continue
            self._used_s[worker.name] = worker.last_used_s
            pace = (await worker.snapshot()).get("pace")
            if isinstance(pace, dict) and len(pace["spans"]) >= _MIN_SPANS:
                self._compared[worker.name] = client
                text = compare_and_store(_key(worker), worker.name, steps_of(pace["spans"]))
                if text:
                    self._report(text)
                    worker.notice = f"{worker.notice} {text}".strip()


def _key(worker: ModelWorker) -> str:
    """Return a key for starts that can be compared: same weights, KV types and placement."""
    info = worker.info
    assert info is not None
    spec = getattr(getattr(worker.host, "options", None), "spec", None)
    placement = "" if spec is None else str(spec.placement)
    where = hashlib.blake2b(placement.encode(), digest_size=4).hexdigest()
    return f"{worker.name} {info.fingerprint[:12]} {info.kv_type_k}/{info.kv_type_v} {where}"
