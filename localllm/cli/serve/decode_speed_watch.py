"""Compares each start of a model with its earlier ones, once it has answered a little, and says when it is slower."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localllm.server.models.router import ModelRouter
    from localllm.server.models.worker import ModelWorker

LOOK_S = 5.0
# Spans that a verdict needs (localllm/engine/host/decode_speed.py keeps eight).
_SPANS = 6


class PaceWatch:
    """Looks at the loaded models of `router`; `say` hears what a person should know, `told` is all that was said."""

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
        from dataclasses import replace

        from localllm.cli.serve import decode_speed as pace_history
        from localllm.device.probes import conditions

        key, here = _key(worker), conditions.read(_ours())
        here = replace(here, lasting={**_build(worker), **here.lasting})
        steps, earlier = pace_history.steps_of(spans), pace_history.load().get(key, [])
        verdict, said = pace_history.judge(steps, earlier), ""
        if verdict is not None and verdict.slower:
            said = pace_history.notice(worker.name, verdict, earlier, here)
            self.told.append(said)
            self._say(said)
        worker.notice = said
        pace_history.keep(key, pace_history.Start(datetime.date.today().isoformat(), steps, here.lasting, said))


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
    from localllm.cli.compose.shared_speeds import build

    info = worker.info
    assert info is not None
    spec = getattr(getattr(worker.host, "options", None), "spec", None)
    made_of = hashlib.blake2b(info.kv_meaning.encode(), digest_size=4).hexdigest()
    threads = str(spec.n_threads or "automatic") if spec is not None else ""
    return {**build(), "build of the engine": made_of, "threads": threads}


def _ours() -> frozenset[int]:
    """This process and those below it."""
    import psutil

    me = psutil.Process()
    return frozenset([me.pid, *(child.pid for child in me.children(recursive=True))])
