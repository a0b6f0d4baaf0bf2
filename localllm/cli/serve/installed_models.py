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

from localllm.cli.serve.served_models import ServedModels, resolved_path
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
# name, the interval is `_MIN_RESCAN_S`.
_SCAN_INTERVAL_S = 10.0
_MIN_RESCAN_S = 1.0


FileAndModel: TypeAlias = tuple[LocalModel, ServedModel]


class DiskModels:
    """The models on this disk. Implements localllm.server.models.served.InstalledModels.

    Their names are known from the start. Their plans are computed in a thread or on request.
    `named` are the models named at the start, with their files. With `only`, no others are offered,
    and these answer to all their names.
    """

    def __init__(self, served: ServedModels, named: Sequence[FileAndModel], *, only: bool) -> None:
        self._served = served
        self._only = only
        self._named = {resolved_path(local.path): (local, model) for local, model in named}
        self._listed: dict[Path, FileAndModel] = {}
        # From the last scan, so that many lookups read the catalog only once.
        self._rules: Rules[ServedModel] = {}
        self._faulty: set[Path] = set()
        self._lock = threading.Lock()
        self._scanned_s = -_SCAN_INTERVAL_S
        self._scan_thread: threading.Thread | None = None
        self.scan()

    def models(self) -> Sequence[ServedModel]:
        """See InstalledModels. If a scan is due, it runs in a thread meanwhile."""
        listed = [model for _, model in self._listed.values()]
        if (self._is_scan_due or not all(model.worker.described for model in listed)) and (
            self._scan_thread is None or not self._scan_thread.is_alive()
        ):
            self._scan_thread = threading.Thread(
                target=self._scan_and_describe, name="library", daemon=True
            )
            self._scan_thread.start()
        return listed

    @property
    def _is_scan_due(self) -> bool:
        return time.monotonic() - self._scanned_s > _SCAN_INTERVAL_S

    def _scan_and_describe(self) -> None:
        if self._is_scan_due:
            self.scan()
        for _, model in [*self._listed.values()]:
            model.worker.describe()

    def rules(self) -> Rules[ServedModel]:
        """See InstalledModels."""
        return self._rules

    def rescan(self) -> bool:
        """See InstalledModels."""
        if time.monotonic() - self._scanned_s <= _MIN_RESCAN_S:
            return False
        self.scan()
        return True

    def scan(self) -> None:
        """Scan the disk. Models that are gone are no longer listed, but a loaded one stays until it
        is unloaded."""
        with self._lock:
            scanned = [] if self._only else self._loadable(store.everything())
            on_disk = {resolved_path(local.path): local for local in reversed(scanned)}
            taken_names = {model.name.lower() for _, model in self._named.values()}
            listed: dict[Path, FileAndModel] = {}
            for path, local in reversed(on_disk.items()):
                if path in self._named:
                    continue
                names = (local.name, f"{local.name}:{local.quant}")
                free_name = next((name for name in names if name.lower() not in taken_names), None)
                file_and_model = self._listed.get(path)
                if file_and_model is None and free_name is not None:
                    file_and_model = (
                        local,
                        self._served.model(replace(local, name=free_name), None),
                    )
                if file_and_model is not None:
                    taken_names.add(file_and_model[1].name.lower())
                    listed[path] = file_and_model
            for path, file_and_model in self._listed.items():
                if file_and_model[1].loaded:
                    listed.setdefault(path, file_and_model)
            self._listed = listed
            self._rules = self._rules_of(self._models_of_files(scanned))
            self._scanned_s = time.monotonic()

    def _loadable(self, scanned: Sequence[LocalModel]) -> list[LocalModel]:
        """The models that may be loaded. Each of the others is logged once."""
        for local in scanned:
            if local.fault and local.path not in self._faulty:
                self._faulty.add(local.path)
                log.warning(f"{local.path} is not offered: {local.fault}")
        return [local for local in scanned if not local.fault]

    def _models_of_files(self, scanned: Sequence[LocalModel]) -> dict[LocalModel, ServedModel]:
        """Map the files of each offered model to the model, also under the other names on the
        disk."""
        offered = self._listed | self._named
        models_of_files = dict(offered.values())
        for local in scanned:
            file_and_model = offered.get(resolved_path(local.path))
            if file_and_model is not None:
                models_of_files[local] = file_and_model[1]
        return models_of_files

    def _rules_of(self, models_of_files: dict[LocalModel, ServedModel]) -> Rules[ServedModel]:
        installed = InstalledNames([*models_of_files])
        return {
            rule: self._served_rule(files, models_of_files)
            for rule, files in installed.rules.items()
        }

    def _served_rule(
        self,
        rule: Callable[[str], Sequence[LocalModel]],
        models_of_files: dict[LocalModel, ServedModel],
    ) -> Callable[[str], Sequence[ServedModel]]:
        def served(typed: str) -> Sequence[ServedModel]:
            files = rule(typed)
            if not files:
                return ()
            return [self._best_match(files, models_of_files)]

        return served

    def _best_match(
        self, files: Sequence[LocalModel], models_of_files: dict[LocalModel, ServedModel]
    ) -> ServedModel:
        """Choose one of several models that match a name.

        A model in memory comes first, because the current free memory must not decide between two
        quants. A model named at the start comes next.
        """
        models = [models_of_files[local] for local in files]
        for model in models:
            if model.state != "available":
                return model
        named_models = [model for _, model in self._named.values()]
        for model in models:
            if model in named_models:
                return model
        return models_of_files[best_of(files)]


@dataclass(frozen=True, slots=True)
class LibraryStore:
    """Implements server.models.installed.ModelStore.

    A reference is a name of the catalog or the hub, never a path.
    """

    offline: bool = False

    def pull(self, ref: str, on_progress: Callable[[StoreProgress], None]) -> None:
        from localllm.library.pull import pull

        def report_progress(progress: DownloadProgress) -> None:
            on_progress(
                StoreProgress(
                    progress.state, progress.done_bytes, progress.total_bytes, progress.digest
                )
            )

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
