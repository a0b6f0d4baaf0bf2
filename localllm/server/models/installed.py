"""What the command line provides to the server: models that are installed but were not named at the start, and the store
that clients may pull to and remove from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.server.models.served import ServedModel


class InstalledModels(Protocol):
    """The models on disk."""

    def models(self) -> Sequence[ServedModel]:
        """All but those named at the start, as of the last scan: never blocks."""
        ...

    def find(self, name: str) -> ServedModel | None:
        """The model that `name` means: a name, file name, repository or catalog id, each also with `:quant`, never a
        path. Reads the disk."""
        ...


@dataclass(frozen=True, slots=True)
class StoreProgress:
    """A moment of a download: `state` listing, checking, downloading, waiting, verifying or done; bytes over all files;
    `digest` is the SHA-256 of the file that is downloaded now, or empty."""

    state: str
    done_bytes: int = 0
    total_bytes: int = 0
    digest: str = ""


class ModelStore(Protocol):
    """Both methods block, and raise the LocalLLMError that the client gets."""

    def pull(self, ref: str, on_progress: Callable[[StoreProgress], None]) -> None:
        """Download `ref`. An exception of `on_progress` stops it; what has arrived is kept."""

    def remove(self, ref: str) -> None:
        """Remove the files of the model that `ref` names."""
