"""The installed backends: the entry-point group `localllm.backends`.

Our own backends are registered in the same way as third-party ones. Their declarations are read
without loading an engine.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING

from localllm_backends.declaration import Declaration
from localllm_backends.installed_packages import entry_points

if TYPE_CHECKING:
    from localllm_backends.backend_type import BackendType

GROUP = "localllm.backends"
NONE = Declaration("", "no engine", ())


@cache
def backends() -> dict[str, BackendType]:
    """Return the registered backends by name, sorted.

    Finding them reads the metadata of all installed packages. It imports no engine.
    """
    return {name: _loaded(value) for name, value in entry_points(GROUP).items()}


def _loaded(value: str) -> BackendType:
    module, _, attribute = value.partition(":")
    found: BackendType = attrgetter(attribute)(import_module(module))
    return found


@cache
def declarations() -> tuple[Declaration, ...]:
    """Return the declaration of each registered backend."""
    return tuple(backend.declaration for backend in backends().values())


@cache
def declared(name: str) -> Declaration:
    """Return the declaration of the backend with that name; `NONE` if there is no such backend."""
    return next((d for d in declarations() if d.name == name), NONE)


@cache
def running(file_format: str) -> Declaration:
    """Return the backend for a catalog file format; `NONE` if no backend runs it."""
    return next((d for d in declarations() if file_format in d.formats), NONE)


def read_code() -> None:
    """Import the engine that runs most files: the first one that can run here."""
    for backend in backends().values():
        if backend.available() is None:
            backend.read_code()
            return
