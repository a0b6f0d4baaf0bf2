"""Selects the backend that runs given files, or explains why no backend can."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import BackendMissingError, ModelFileError, ModelNotFoundError, UsageError
from localllm_backends import registry

if TYPE_CHECKING:
    from localllm_backends.backend_type import BackendType


def named(name: str) -> BackendType:
    """The backend registered under `name`. Raises UsageError with the other names if it is
    missing.
    """
    found = registry.backends().get(name)
    if found is None:
        raise UsageError(
            f"there is no backend {name!r}",
            hint=f"installed backends: {', '.join(registry.backends()) or 'none'}",
        )
    return found


def for_path(path: str, preferred: str = "auto") -> BackendType:
    """The backend for the files at `path`: `preferred`, or the first available one that accepts
    them.
    """
    if not Path(path).exists():
        raise ModelNotFoundError(
            f"there is no model at {path!r}", hint="check the path, or see `localllm models list`"
        )
    if preferred != "auto":
        backend = named(preferred)
        _require(backend)
        if not backend.accepts(path):
            known = ", ".join(f"{d.name} runs {d.files}" for d in registry.declarations())
            raise ModelFileError(
                f"{Path(path).name!r} is not a model for the {preferred} backend",
                hint=f"use --backend auto, which chooses by the files ({known})",
            )
        return backend
    accepting = [b for b in registry.backends().values() if b.accepts(path)]
    if not accepting:
        known = " or ".join(d.files for d in registry.declarations())
        raise ModelFileError(
            f"{Path(path).name!r} is not a model that an installed backend supports: {known}",
            hint="use such a path, or a name from `localllm models list`",
        )
    for backend in accepting:
        if backend.available() is None:
            return backend
    _require(accepting[0])
    return accepting[0]


def _require(backend: BackendType) -> None:
    missing = backend.available()
    if missing is not None:
        raise BackendMissingError(missing)
