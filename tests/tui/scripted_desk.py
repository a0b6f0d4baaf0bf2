"""A desk that plays plans and downloads, for the tests of the screen of models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from localllm.errors import LocalLLMError, UsageError
from localllm_tui.control.interfaces import Offer, OnDisk, Planned, PullProgress, Wish


def offer(name: str, gigabytes: float = 4.0, **more: object) -> Offer:
    """A plan of a model of this size."""
    n_bytes = int(gigabytes * 1e9)
    made = Offer(
        f"{name}:Q4", name.upper(), "Q4", "yes", n_bytes, 24_000_000_000, 16384, "f16", 20.0, 15.0, 25.0, 0.5, 0.5, 50.0,
        n_bytes, f"why {name}", ("a further reason",),
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


class ScriptedDesk:
    """Plans `offers` that are within the memory, less of them the longer the context. Downloads move when a test says so."""

    def __init__(self, *offers: Offer, disk: Sequence[OnDisk] = ()) -> None:
        self.offers, self.disk = list(offers), list(disk)
        self.wishes: list[Wish] = []
        self.pulled: list[str] = []
        self.removed: list[str] = []
        self.go_on = threading.Semaphore(0)
        self.fails: LocalLLMError | None = None

    def plan(self, wish: Wish) -> Planned:
        if wish.machine == "nonsense":
            raise UsageError("no machine of that name")
        self.wishes.append(wish)
        fitting = self.offers[: max(1, len(self.offers) - wish.context // 65536)]
        machine = wish.machine or "this machine"
        too_large = len(self.offers) - len(fitting)
        return Planned(wish, machine, tuple(fitting), {"too large": too_large} if too_large else {})

    def explain(self, wish: Wish, ref: str, columns: int) -> Sequence[str]:
        return [f"the arithmetic of {ref} with {wish.context} tokens"]

    def on_disk(self) -> Sequence[OnDisk]:
        return [*self.disk]

    def fit(self, model: OnDisk) -> str:
        return f"takes 1.0 of 24.0 GB: {model.name}"

    def remove(self, model: OnDisk) -> int:
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
        self.offers = [replace(o, installed=name) if o.ref == ref else o for o in self.offers]
        return name
