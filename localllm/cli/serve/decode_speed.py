"""Whether a model is slower than at its last start here: an update must slow nobody without a
word."""

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

# So much more time a step takes where speed has fallen by a fifth.
SLOWER = 1.25
_MOST_MODELS = 64
# Depths within an eighth of an octave, at first within this many tokens, are compared with each
# other.
_NEAR_TOKENS = 128
_FROM_TOKENS = 1024
_PER_OCTAVE = 8
INTERVAL_S = 5.0
# Spans that a comparison needs (localllm/engine/metrics.py keeps eight).
_SPANS = 6


@dataclass(frozen=True, slots=True)
class UsualSpeed:
    """What a model's next start is compared with: `steps` are seconds of a plain decode step by
    depth (as `depth_bin` groups them); `slower`: the last start was slower, and these are of those
    before."""

    steps: dict[str, float]
    slower: bool = False


def path() -> Path:
    return paths.data_dir() / "decode_speeds.json"


def depth_bin(depth: int) -> str:
    """Which depths are as good as the same."""
    if depth < _FROM_TOKENS:
        return str(depth // _NEAR_TOKENS * _NEAR_TOKENS)
    octaves = math.log2(depth / _FROM_TOKENS)
    least = math.floor(octaves * _PER_OCTAVE) / _PER_OCTAVE
    return str(round(_FROM_TOKENS * 2**least))


def steps_of(spans: Sequence[Sequence[float]]) -> dict[str, float]:
    """Seconds of a step by depth, from what a worker collected: the lower median of each depth,
    since whatever else happened only ever slowed it down."""
    found: dict[str, list[float]] = {}
    for depth, step_s in spans:
        found.setdefault(depth_bin(int(depth)), []).append(step_s)
    return {depth: statistics.median_low(values) for depth, values in found.items()}


def notice(model: str, steps: Mapping[str, float], usual: Mapping[str, float]) -> str:
    """A sentence on a model that is slower by a fifth or more, by the median over the depths that
    both know; else ""."""
    ratios = {depth: steps[depth] / usual[depth] for depth in steps.keys() & usual.keys()}
    if not ratios:
        return ""
    depths = sorted(ratios, key=ratios.__getitem__)
    median = depths[(len(depths) - 1) // 2]
    if steps[median] < SLOWER * usual[median]:
        return ""
    now = 1 / steps[median]
    before = 1 / usual[median]
    return f"{model} is slower than it was here: {now:.3g} tok/s, where {before:.3g} were usual"


def load() -> dict[str, UsualSpeed]:
    """Every model's usual speed, by the key it was kept under; a damaged or missing file is
    none."""
    found = {}
    for key, entry in json_store.read(path()).items():
        speed = json_store.record(UsualSpeed, entry)
        if speed is None:
            continue
        if all(isinstance(s, float) and 0 < s < math.inf for s in speed.steps.values()):
            found[key] = speed
    return found


def compare(key: str, model: str, steps: Mapping[str, float]) -> str:
    """The notice of a start with these `steps`; they are what the next one is compared with, unless
    they are slower for the first time: then the next start is compared with the same as this
    one."""
    speeds = load()
    usual = speeds.pop(key, UsualSpeed({}))
    text = notice(model, steps, usual.steps)
    if text and not usual.slower:
        speeds[key] = UsualSpeed(usual.steps, slower=True)
    else:
        speeds[key] = UsualSpeed({**usual.steps, **steps})
    latest = list(speeds.items())[-_MOST_MODELS:]
    json_store.keep(path(), {key: asdict(speed) for key, speed in latest})
    return text


class DecodeSpeedWatch:
    """Compares each start of a model of `router` with the last one, once it has answered a little;
    `report` hears of those that are slower."""

    def __init__(self, router: ModelRouter, report: Callable[[str], None]) -> None:
        self._router = router
        self._report = report
        self._compared: dict[str, Any] = {}
        self._used_s: dict[str, float] = {}

    @property
    def compared(self) -> bool:
        """Whether any model's start has been compared, and is loaded still."""
        return bool(self._compared)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Compare the starts that can be compared now, each once."""
        for worker in self._router.workers():
            if not worker.loaded:
                self._compared.pop(worker.name, None)
                continue
            client = getattr(worker.host, "client", None)
            if client is None or self._compared.get(worker.name) is client:
                continue
            # A model that was not used since is left to sleep.
            if self._used_s.get(worker.name) == worker.last_used_s:
                continue
            self._used_s[worker.name] = worker.last_used_s
            pace = (await worker.snapshot()).get("pace")
            if isinstance(pace, dict) and len(pace["spans"]) >= _SPANS:
                self._compared[worker.name] = client
                text = compare(_key(worker), worker.name, steps_of(pace["spans"]))
                if text:
                    self._report(text)
                    worker.notice = f"{worker.notice} {text}".strip()


def _key(worker: ModelWorker) -> str:
    """What must be the same for two starts to be compared: the weights, the KV types, and where the
    model lies."""
    info = worker.info
    assert info is not None
    spec = getattr(getattr(worker.host, "options", None), "spec", None)
    placement = "" if spec is None else str(spec.placement)
    where = hashlib.blake2b(placement.encode(), digest_size=4).hexdigest()
    return f"{worker.name} {info.fingerprint[:12]} {info.kv_type_k}/{info.kv_type_v} {where}"
