"""The models on this disk as a server offers them: listed at once, each described when there is
time or somebody asks; and what its clients may fetch and remove."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.cli.serve.served_models import ServedModels, real_path
from localllm.library.catalog import load_catalog
from localllm.load.candidates import variant_choice

if TYPE_CHECKING:
    from pathlib import Path

    from localllm.library.transfer import DownloadProgress
    from localllm.library.types import LocalModel
    from localllm.server.models.served import ServedModel, StoreProgress


# The disk is looked at again when a list is asked for this long after the last look, and for a name
# nobody has sooner.
_FRESH_S = 10.0
_LOOK_AGAIN_S = 1.0


class DiskModels:
    """The models on this disk (implements localllm.server.models.served.InstalledModels). Their
    names are known from the start; what each would be is found out in a thread, or when it is asked
    for. `named` were named at the start, with their files; with `only` no others are offered, and
    those answer to all their names."""

    def __init__(
        self, served: ServedModels, named: Sequence[tuple[LocalModel, ServedModel]], *, only: bool
    ) -> None:
        self._served, self._only = served, only
        self._named = {real_path(local.path): model for local, model in reversed(named)}
        self._named_locals = [local for local, _ in named]
        self._locals: list[LocalModel] = list(self._named_locals)
        self._listed: dict[Path, ServedModel] = {}
        self._undescribed: dict[Path, LocalModel] = {}
        self._lock = threading.Lock()
        self._looked_s = -_FRESH_S
        self._looking: threading.Thread | None = None
        self.look()

    def models(self) -> Sequence[ServedModel]:
        """See InstalledModels. A look at the disk that is due goes on in a thread meanwhile."""
        if (self._stale or self._undescribed) and (
            self._looking is None or not self._looking.is_alive()
        ):
            self._looking = threading.Thread(target=self._look_closely, name="library", daemon=True)
            self._looking.start()
        return [*self._listed.values()]

    @property
    def _stale(self) -> bool:
        return time.monotonic() - self._looked_s > _FRESH_S

    def _look_closely(self) -> None:
        if self._stale:
            self.look()
        for path in [*self._undescribed]:
            self._describe(path)

    def _describe(self, path: Path) -> None:
        local, model = self._undescribed.pop(path, None), self._listed.get(path)
        if local is not None and model is not None:
            self._served.describe(local, model)

    def find(self, name: str) -> ServedModel | None:
        found = self._find(name)
        if found is None and time.monotonic() - self._looked_s > _LOOK_AGAIN_S:
            self.look()
            found = self._find(name)
        return found

    def look(self) -> None:
        """Look at the disk. Models that are there no more are no longer listed; one that is loaded
        stays until it is unloaded."""
        from localllm.library import store

        if self._only:
            self._looked_s = time.monotonic()
            return
        with self._lock:
            found = {real_path(local.path): local for local in reversed(store.scan())}
            taken = {model.name.lower() for model in self._named.values()}
            listed: dict[Path, ServedModel] = {}
            for path, local in reversed(found.items()):
                if path in self._named:
                    continue
                model = self._listed.get(path) or self._listed_as(local, taken)
                if model is not None:
                    taken.add(model.name.lower())
                    listed[path] = model
                    if path not in self._listed:
                        self._undescribed[path] = local
            for path, model in self._listed.items():
                if model.loaded:
                    listed.setdefault(path, model)
            self._locals = [*self._named_locals, *(found[path] for path in listed if path in found)]
            self._listed = listed
            self._looked_s = time.monotonic()

    def _listed_as(self, local: LocalModel, taken: set[str]) -> ServedModel | None:
        """A model for the list, under a name nobody has; None where there is none left."""

        for name in (local.name, f"{local.name}:{local.quant}"):
            if name.lower() not in taken:
                return self._served.model(replace(local, name=name), None)
        return None

    def _find(self, name: str) -> ServedModel | None:
        from localllm.library.resolve import best_of, matching

        locals_ = self._locals
        candidates = matching(name, locals_)
        if not candidates:
            return None
        models = [model for local in candidates if (model := self._of(local)) is not None]
        # One that is in memory answers first: what is free now must not decide between two quants
        # of a model.
        in_memory = [m for m in models if m.state != "available"]
        named = [m for m in models if m in self._named.values()]
        if in_memory or named:
            return (in_memory or named)[0]
        return self._of(best_of(candidates))

    def _of(self, local: LocalModel) -> ServedModel | None:
        path = real_path(local.path)
        self._describe(path)
        return self._named.get(path) or self._listed.get(path)


@dataclass(frozen=True, slots=True)
class LibraryStore:
    """Implements server.models.installed.ModelStore. A reference is a name of the catalog or the
    hub, never a path."""

    offline: bool = False

    def pull(self, ref: str, on_progress: Callable[[StoreProgress], None]) -> None:
        from localllm.library.pull import pull
        from localllm.server.models.served import StoreProgress

        def hear(p: DownloadProgress) -> None:
            on_progress(StoreProgress(p.state, p.done_bytes, p.total_bytes, p.digest))

        name = _ours(ref)
        pull(name, on_progress=hear, choose=variant_choice(name), offline=self.offline, mmproj=True)

    def remove(self, ref: str) -> None:
        from localllm.library import store
        from localllm.library.resolve import resolve

        store.rm(resolve(_ours(ref), offline=True))


def _ours(ref: str) -> str:
    """`ref` as the library knows it: Ollama's `qwen3:8b` is the catalog's qwen3-8b. Raises
    UsageError for a path."""
    from localllm.library import names

    names.parse(ref)
    ref = ref.removesuffix(":latest")
    family, colon, size = ref.partition(":")
    if colon and "/" not in ref:
        catalog = load_catalog()
        if catalog.get(family) is None and catalog.get(f"{family}-{size.lower()}") is not None:
            return f"{family}-{size.lower()}"
    return ref
