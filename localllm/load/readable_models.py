"""Find out before loading whether the installed llama.cpp can read a model's architecture."""

from __future__ import annotations

from collections.abc import Iterable

from localllm.device.library_facts import Architectures, architectures_of, library_in, version_in
from localllm.device.probes import library_folder
from localllm.errors import BackendError
from localllm_catalog.architectures import FIRST_RELEASES
from localllm_catalog.types import Model

_NEWEST = "`localllm setup --engine latest`"


class EngineTooOldError(
    BackendError,
    code="engine_too_old",
    default_hint=f"{_NEWEST} installs llama.cpp's newest release; `localllm setup --list` shows "
    "the engines here",
):
    """The installed llama.cpp can't read models of this architecture."""


def too_new(models: Iterable[Model]) -> tuple[tuple[str, str], ...]:
    """Return (id, reason) of the models whose GGUF files the installed llama.cpp can't read."""
    architectures, version = _installed()
    if architectures is None:
        return ()
    return tuple(
        (model.id, f"needs {_needed(model.gguf_architecture, version)}: {_NEWEST}")
        for model in models
        if model.gguf_architecture and not architectures.has(model.gguf_architecture)
    )


def check(architecture: str, name: str) -> None:
    """Raise EngineTooOldError if the installed llama.cpp can't read the model `name`."""
    architectures, version = _installed()
    if architectures is not None and not architectures.has(architecture):
        raise EngineTooOldError(
            f"{name} needs {_needed(architecture, version)}: it has the architecture "
            f"{architecture[:60]!r}, which the installed one can't read"
        )


def _installed() -> tuple[Architectures | None, str]:
    """Return the architectures and the version of the library that a worker would load."""
    folder = library_folder()
    if folder is None:
        return None, ""
    library = library_in(folder)
    if library is None:
        return None, ""
    return architectures_of(library), version_in(folder)


def _needed(architecture: str, version: str) -> str:
    first = FIRST_RELEASES.get(architecture)
    if first is not None:
        return f"llama.cpp {first} or newer"
    if version:
        return f"a llama.cpp newer than {version}"
    return "a newer llama.cpp"
