"""The backends that are installed: the entry-point group `localllm.backends`, ours registered
exactly as a third party's.

What they declare is known without loading any engine.
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
    """The registered backends by name, in order. Finding them reads the metadata of all that is
    installed; none imports its engine."""
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=GROUP), key=attrgetter("name"))
    return {point.name: point.load() for point in points}


@cache
def declarations() -> tuple[Declaration, ...]:
    """What each registered backend declares."""
    return tuple(backend.declaration for backend in backends().values())


@cache
def declared(name: str) -> Declaration:
    """What the backend of that name declares; `NONE` if there is none."""
    return next((d for d in declarations() if d.name == name), NONE)


@cache
def running(file_format: str) -> Declaration:
    """The backend for files of a catalog's format; `NONE` if none runs them."""
    return next((d for d in declarations() if file_format in d.formats), NONE)


def read_code() -> None:
    """Import the engine that runs most files: the first that can run here."""
    for backend in backends().values():
        if backend.available() is None:
            backend.read_code()
            return
