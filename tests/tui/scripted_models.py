"""A model service with scripted plans and downloads, for the tests of the models screen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control.interfaces import (
    InstalledModel,
    PlanChoice,
    PlanList,
    PlanRequest,
    PullProgress,
    ignore_part,
)


def choice(name: str, gigabytes: float = 4.0, *, installed: str = "", **more: Any) -> PlanChoice:
    """Return a plan of a model of this size."""
    n_bytes = int(gigabytes * 1e9)
    plan = {
        "model": name, "name": name.upper(), "variant": {"quant": "Q4", "bytes": n_bytes},
        "fits": "yes",
        "memory": {"total_bytes": n_bytes, "limit_bytes": 24_000_000_000}, "n_ctx": 16384,
        "kv_type": "f16",
        "decode_tok_s": {"value": 20.0, "low": 15.0, "high": 25.0}, "ttft_s": {"value": 0.5},
        "quality": {"points": 50.0, "basis": "an index of many tests"}, "score": 50.0,
        "why": f"why {name}", "reasons": ["a further reason"],
    }  # fmt: skip
    return PlanChoice({**plan, **more}, 0.5, installed)


class ScriptedModelService:
    """Plan those of `choices` that fit into memory: fewer, the longer the context.

    Downloads progress when a test releases them.
    """

    def __init__(self, *choices: PlanChoice, disk: Sequence[InstalledModel] = ()) -> None:
        self.choices, self.disk = list(choices), list(disk)
        self.requests: list[PlanRequest] = []
        self.pulled: list[str] = []
        self.removed: list[str] = []
        self.go_on = threading.Semaphore(0)
        self.fails: LocalLLMError | None = None
        self.gate: threading.Event | None = None  # planning waits for it
        self.row_gate: threading.Semaphore | None = None  # each plan waits for it
        self.worst_first = False  # makes the worst plan first
        self.guessed = False  # marks the memory's speed as a guess

    def plan(
        self, request: PlanRequest, on_choice: Callable[[PlanChoice], object] = ignore_part
    ) -> PlanList:
        if request.machine == "nonsense":
            raise UsageError("no machine of that name")
        self.requests.append(request)
        assert self.gate is None or self.gate.wait(60)
        fitting = self.choices[: max(1, len(self.choices) - request.context // 65536)]
        for one in reversed(fitting) if self.worst_first else fitting:
            assert self.row_gate is None or self.row_gate.acquire(timeout=60)
            on_choice(one)
        assert self.row_gate is None or self.row_gate.acquire(timeout=60)
        machine = request.machine or "this machine"
        too_large = len(self.choices) - len(fitting)
        return PlanList(
            machine,
            tuple(fitting),
            {"too large": too_large} if too_large else {},
            guessed=self.guessed,
        )

    def explain(self, request: PlanRequest, ref: str, columns: int) -> Sequence[str]:
        return [f"the arithmetic of {ref} with {request.context} tokens"]

    def on_disk(self) -> Sequence[InstalledModel]:
        return [*self.disk]

    def fit(self, model: InstalledModel) -> str:
        return f"takes 1.0 of 24.0 GB: {model.name}"

    def remove(self, model: InstalledModel) -> int:
        if not model.ours:
            raise UsageError(f"{model.name} belongs to {model.owner}")
        self.removed.append(model.name)
        self.disk.remove(model)
        return model.size_bytes

    def pull(self, ref: str, told: Callable[[PullProgress], None]) -> str:
        self.pulled.append(ref)
        for share in (25, 50, 75, 100):
            self.go_on.acquire()
            if self.fails is not None:
                raise self.fails
            told(PullProgress("pulling", share * 10**7, 10**9, 5e6, 31.0))
        name = ref.partition(":")[0]
        self.choices = [replace(o, installed=name) if o.ref == ref else o for o in self.choices]
        return name
