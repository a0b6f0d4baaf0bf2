"""The installed backends: the entry-point group `localllm.backends`.

Our own backends are registered in the same way as third-party ones. Their declarations are read
without loading an engine.
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING

from localllm_backends.declaration import Declaration

if TYPE_CHECKING:
    from localllm_backends.contract import BackendType

GROUP = "localllm.backends"
NONE = Declaration("", "no engine", ())


@cache
def backends() -> dict[str, BackendType]:
    """Return the registered backends by name, sorted.

    Finding them reads the metadata of all installed packages. It imports no engine.
    """
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=GROUP), key=attrgetter("name"))
    return {point.name: point.load() for point in points}


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
