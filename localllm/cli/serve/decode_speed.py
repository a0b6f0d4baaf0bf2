"""How fast each model was at each of its starts here, and whether it is slower now: an update must slow nobody silently."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import json_store, paths
from localllm.device.probes.conditions import Conditions, changed

if TYPE_CHECKING:
    from localllm.server.models.router import ModelRouter
    from localllm.server.models.worker import ModelWorker

# So much more time a step takes where speed has fallen by a fifth.
SLOWER = 1.25
# Starts that are compared with: fewer are no history, and of older ones the machine was perhaps another.
_FEWEST_STARTS, _MOST_STARTS = 2, 10
_MOST_MODELS = 64
# Depths within an eighth of an octave, at first within this many tokens, are compared with each other.
_NEAR_TOKENS, _FROM_TOKENS, _PER_OCTAVE = 128, 1024, 8
LOOK_S = 5.0
# Spans that a verdict needs (localllm/engine/host/metrics.py keeps eight).
_SPANS = 6


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One start of a model: `steps` are seconds of a plain decode step by depth (as `depth_bin` groups them),
    `conditions` what it ran under; `notice` what was said of it, "" where it was as fast as ever."""

    date: str
    steps: Mapping[str, float]
    conditions: Mapping[str, str] = field(default_factory=dict)
    notice: str = ""


@dataclass(frozen=True, slots=True)
class SpeedVerdict:
    """`factor`: how much longer a step takes than before (1: as long), by the median over depths; the speeds in tokens/s
    are those of the depth that most of the steps had."""

    factor: float
    now_tok_s: float
    before_tok_s: float
    starts: int

    @property
    def slower(self) -> bool:
        """By a fifth of its speed or more."""
        return self.factor >= SLOWER


def path() -> Path:
    """The file that the history is kept in."""
    return paths.data_dir() / "pace.json"


def depth_bin(depth: int) -> str:
    """Which depths are as good as the same."""
    if depth < _FROM_TOKENS:
        return str(depth // _NEAR_TOKENS * _NEAR_TOKENS)
    return str(round(_FROM_TOKENS * 2 ** (math.floor(math.log2(depth / _FROM_TOKENS) * _PER_OCTAVE) / _PER_OCTAVE)))


def steps_of(spans: Sequence[Sequence[float]]) -> dict[str, float]:
    """Seconds of a step by depth, from what a worker collected: of each depth the faster half's slowest, since whatever
    else happened only ever slowed it down."""
    found: dict[str, list[float]] = {}
    for depth, step_s in spans:
        found.setdefault(depth_bin(int(depth)), []).append(step_s)
    return {name: sorted(values)[(len(values) - 1) // 2] for name, values in found.items()}


def judge(steps: Mapping[str, float], earlier: Sequence[StartRecord]) -> SpeedVerdict | None:
    """How `steps` compare with earlier starts; None where too few of those were at the same depths."""
    latest = earlier[-_MOST_STARTS:]
    known: dict[str, float] = {}
    counted = 0
    for name in steps:
        values = [start.steps[name] for start in latest if name in start.steps]
        if len(values) >= _FEWEST_STARTS:
            known[name] = statistics.median(values)
            counted = max(counted, len(values))
    if not known:
        return None
    factors = {name: steps[name] / usual for name, usual in known.items()}
    factor = statistics.median(factors.values())
    name = min(factors, key=lambda n: abs(factors[n] - factor))
    return SpeedVerdict(factor, 1 / steps[name], 1 / known[name], counted)


def notice(model: str, verdict: SpeedVerdict, earlier: Sequence[StartRecord], here: Conditions) -> str:
    """One sentence for a person: how much slower, and what is otherwise than it was."""
    said = (
        f"{model} is slower than it was here: {verdict.now_tok_s:.3g} tok/s, where {verdict.before_tok_s:.3g} were usual "
        f"({verdict.starts} starts)"
    )
    usual = [start for start in earlier[-_MOST_STARTS:] if not start.notice] or earlier
    causes = [*changed(usual[-1].conditions, here.lasting), *here.now]
    return f"{said}. {'Changed' if causes else 'Nothing known has changed'}{': ' if causes else ''}{'; '.join(causes)}"


def load(file: Path | None = None) -> dict[str, list[StartRecord]]:
    """Every model's starts, oldest first, by the key they were kept under; a damaged or missing file is none."""
    models = json_store.read(file or path()).get("models")
    if not isinstance(models, dict):
        return {}
    return {
        key: [start for entry in entries if (start := _start(entry)) is not None]
        for key, entries in models.items()
        if isinstance(entries, list)
    }


def _start(entry: Any) -> StartRecord | None:
    names = {f.name for f in fields(StartRecord)}
    try:
        start = StartRecord(**{name: value for name, value in entry.items() if name in names})
        good = all(isinstance(v, float) and math.isfinite(v) and v > 0 for v in start.steps.values())
        return start if good and isinstance(start.conditions, dict) and isinstance(start.notice, str) else None
    except (TypeError, AttributeError):
        return None


def keep(key: str, start: StartRecord, file: Path | None = None) -> None:
    """Add a start; the oldest of this model go first, and the model longest unused. A full disk keeps nothing."""
    target = file or path()
    models = load(target)
    models[key] = [*models.pop(key, [])[-(2 * _MOST_STARTS - 1) :], start]
    body = {"models": {k: [asdict(s) for s in starts] for k, starts in [*models.items()][-_MOST_MODELS:]}}
    try:
        paths.private_dir(target.parent)
        paths.write_private(target, json.dumps(body, indent=1))
    except OSError:
        pass


class DecodeSpeedWatch:
    """Compares each start of a model of `router` with its earlier ones, once it has answered a little; `say` hears what a person
    should know, `told` is all that was said."""

    def __init__(self, router: ModelRouter, say: Callable[[str], None]) -> None:
        self._router, self._say = router, say
        self._judged: dict[str, Any] = {}
        self._used_s: dict[str, float] = {}
        self.told: list[str] = []

    @property
    def judged(self) -> bool:
        """Whether any model's start has been judged, and is loaded still."""
        return bool(self._judged)

    async def run(self, look_s: float = LOOK_S) -> None:
        """Until cancelled."""
        import asyncio

        while True:
            await asyncio.sleep(look_s)
            await self.look()

    async def look(self) -> None:
        """Judge the starts that can be judged now, each once."""
        for worker in self._router.workers():
            if not worker.loaded:
                self._judged.pop(worker.name, None)
                continue
            client = getattr(worker.host, "client", None)
            if client is None or self._judged.get(worker.name) is client:
                continue
            # A model that was not used since is left to sleep.
            if self._used_s.get(worker.name) == worker.last_used_s:
                continue
            self._used_s[worker.name] = worker.last_used_s
            pace = (await worker.snapshot()).get("pace")
            if isinstance(pace, dict) and len(pace["spans"]) >= _SPANS:
                self._judged[worker.name] = client
                self._judge(worker, pace["spans"])

    def _judge(self, worker: ModelWorker, spans: list[list[float]]) -> None:
        import datetime

        from localllm.device.probes import conditions

        key, here = _key(worker), conditions.read(_ours())
        here = replace(here, lasting={**_build(worker), **here.lasting})
        steps, earlier = steps_of(spans), load().get(key, [])
        verdict, said = judge(steps, earlier), ""
        if verdict is not None and verdict.slower:
            said = notice(worker.name, verdict, earlier, here)
            self.told.append(said)
            self._say(said)
            worker.notice = f"{worker.notice} {said}".strip()
        keep(key, StartRecord(datetime.date.today().isoformat(), steps, here.lasting, said))


def _key(worker: ModelWorker) -> str:
    """What must be the same for two starts to be compared: the weights, the KV types, and where the model lies."""
    info = worker.info
    assert info is not None
    spec = getattr(getattr(worker.host, "options", None), "spec", None)
    # As earlier versions wrote it, whose starts are compared with.
    layers = spec.n_gpu_layers if spec is not None else 0
    placed = f"{layers} {spec.placement}".replace(f"gpu_layers={layers}, ", "") if spec is not None else ""
    where = hashlib.blake2b(placed.encode(), digest_size=4).hexdigest()
    return f"{worker.name} {info.fingerprint[:12]} {info.kv_type_k}/{info.kv_type_v} {where}"


def _build(worker: ModelWorker) -> dict[str, str]:
    """What of ours and the engine's may have changed between two starts."""
    from localllm.load.measurements import versions

    info = worker.info
    assert info is not None
    spec = getattr(getattr(worker.host, "options", None), "spec", None)
    made_of = hashlib.blake2b(info.kv_meaning.encode(), digest_size=4).hexdigest()
    threads = str(spec.n_threads or "automatic") if spec is not None else ""
    return {**versions(), "build of the engine": made_of, "threads": threads}


def _ours() -> frozenset[int]:
    """This process and those below it."""
    import psutil

    me = psutil.Process()
    return frozenset([me.pid, *(child.pid for child in me.children(recursive=True))])
