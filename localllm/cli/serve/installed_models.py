"""Offer the models on this disk to a server's clients.

All models are listed at once. Each is described in the background or on request. Clients may also
download and remove models here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from localllm.cli.serve.served_models import ServedModels, real_path
from localllm.library import names, store
from localllm.library.installed_names import InstalledNames
from localllm.library.resolve import best_of, resolve
from localllm.library.types import LocalModel
from localllm.load.candidates import variant_choice
from localllm.model_names import Rules
from localllm.server.models.served import ServedModel, StoreProgress

if TYPE_CHECKING:
    from localllm.library.transfer import DownloadProgress

log = logging.getLogger("localllm.server")
# The disk is scanned again if a list is requested this long after the last scan. For an unknown
# name, the interval is `_RESCAN_S`.
_FRESH_S = 10.0
_RESCAN_S = 1.0


Offered: TypeAlias = tuple[LocalModel, ServedModel]


class DiskModels:
    """The models on this disk. Implements localllm.server.models.served.InstalledModels.

    Their names are known from the start. Their plans are computed in a thread or on request.
    `named` are the models named at the start, with their files. With `only`, no others are offered,
    and these answer to all their names.
    """

    def __init__(self, served: ServedModels, named: Sequence[Offered], *, only: bool) -> None:
        self._served = served
        self._only = only
        self._named = {real_path(local.path): (local, model) for local, model in named}
        self._listed: dict[Path, Offered] = {}
        # From the last scan, so that many lookups read the catalog only once.
        self._rules: Rules[ServedModel] = {}
        self._faulty: set[Path] = set()
        self._lock = threading.Lock()
        self._looked_s = -_FRESH_S
        self._looking: threading.Thread | None = None
        self.look()

    def models(self) -> Sequence[ServedModel]:
        """See InstalledModels. If a scan is due, it runs in a thread meanwhile."""
        listed = [model for _, model in self._listed.values()]
        if (self._stale or not all(model.worker.described for model in listed)) and (
            self._looking is None or not self._looking.is_alive()
        ):
            self._looking = threading.Thread(target=self._look_closely, name="library", daemon=True)
            self._looking.start()
        return listed

    @property
    def _stale(self) -> bool:
        return time.monotonic() - self._looked_s > _FRESH_S

    def _look_closely(self) -> None:
        if self._stale:
            self.look()
        for _, model in [*self._listed.values()]:
            model.worker.describe()

    def rules(self) -> Rules[ServedModel]:
        """See InstalledModels."""
        return self._rules

    def rescan(self) -> bool:
        """See InstalledModels."""
        if time.monotonic() - self._looked_s <= _RESCAN_S:
            return False
        self.look()
        return True

    def look(self) -> None:
        """Scan the disk. Models that are gone are no longer listed, but a loaded one stays until it
        is unloaded."""
        with self._lock:
            scanned = [] if self._only else self._loadable(store.everything())
            on_disk = {real_path(local.path): local for local in reversed(scanned)}
            taken = {model.name.lower() for _, model in self._named.values()}
            listed: dict[Path, Offered] = {}
            for path, local in reversed(on_disk.items()):
                if path in self._named:
                    continue
                names = (local.name, f"{local.name}:{local.quant}")
                free = next((name for name in names if name.lower() not in taken), None)
                found = self._listed.get(path)
                if found is None and free is not None:
                    found = (local, self._served.model(replace(local, name=free), None))
                if found is not None:
                    taken.add(found[1].name.lower())
                    listed[path] = found
            for path, found in self._listed.items():
                if found[1].loaded:
                    listed.setdefault(path, found)
            self._listed = listed
            self._rules = self._rules_of(self._answering(scanned))
            self._looked_s = time.monotonic()

    def _loadable(self, found: Sequence[LocalModel]) -> list[LocalModel]:
        """The models that may be loaded. Each of the others is logged once."""
        for local in found:
            if local.fault and local.path not in self._faulty:
                self._faulty.add(local.path)
                log.warning(f"{local.path} is not offered: {local.fault}")
        return [local for local in found if not local.fault]

    def _answering(self, scanned: Sequence[LocalModel]) -> dict[LocalModel, ServedModel]:
        """Map the files of each offered model to the model, also under the other names on the
        disk."""
        offered = self._listed | self._named
        answers = dict(offered.values())
        for local in scanned:
            found = offered.get(real_path(local.path))
            if found is not None:
                answers[local] = found[1]
        return answers

    def _rules_of(self, answers: dict[LocalModel, ServedModel]) -> Rules[ServedModel]:
        installed = InstalledNames([*answers])
        return {rule: self._served_by(files, answers) for rule, files in installed.rules.items()}

    def _served_by(
        self, rule: Callable[[str], Sequence[LocalModel]], answers: dict[LocalModel, ServedModel]
    ) -> Callable[[str], Sequence[ServedModel]]:
        def served(typed: str) -> Sequence[ServedModel]:
            files = rule(typed)
            if not files:
                return ()
            return [self._chosen(files, answers)]

        return served

    def _chosen(
        self, files: Sequence[LocalModel], answers: dict[LocalModel, ServedModel]
    ) -> ServedModel:
        """Choose one of several models that match a name.

        A model in memory comes first, because the current free memory must not decide between two
        quants. A model named at the start comes next.
        """
        models = [answers[local] for local in files]
        for model in models:
            if model.state != "available":
                return model
        named = [model for _, model in self._named.values()]
        for model in models:
            if model in named:
                return model
        return answers[best_of(files)]


@dataclass(frozen=True, slots=True)
class LibraryStore:
    """Implements server.models.installed.ModelStore.

    A reference is a name of the catalog or the hub, never a path.
    """

    offline: bool = False

    def pull(self, ref: str, on_progress: Callable[[StoreProgress], None]) -> None:
        from localllm.library.pull import pull

        def report_progress(p: DownloadProgress) -> None:
            on_progress(StoreProgress(p.state, p.done_bytes, p.total_bytes, p.digest))

        names.parse(ref)
        pull(
            ref,
            on_progress=report_progress,
            choose=variant_choice(ref),
            offline=self.offline,
            mmproj=True,
        )

    def remove(self, ref: str) -> None:
        names.parse(ref)
        store.rm(resolve(ref))
