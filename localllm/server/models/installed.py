"""What a router asks of the models that are installed but were not named when the server started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from localllm.server.models.served import ServedModel


class InstalledModels(Protocol):
    """The installed models."""

    def models(self) -> Sequence[ServedModel]:
        """All of them but those named at the start. Answers at once, with what was there when it last looked."""
        ...

    def find(self, name: str) -> ServedModel | None:
        """The model that `name` means (its name, file name, repository, catalog id, each also with `:quant`), whether
        named at the start or not. Looks at the disk: called in a thread where that matters. Never takes a path."""
        ...


class Progress(Protocol):
    """A moment of a download: `state` listing, checking, downloading, waiting, verifying or done; bytes of all files;
    `digest` is the hash of the file that is on its way."""

    @property
    def state(self) -> str:
        """What is done."""

    @property
    def done_bytes(self) -> int:
        """Bytes that are there."""

    @property
    def total_bytes(self) -> int:
        """Bytes in all."""

    @property
    def digest(self) -> str:
        """Its hash, or nothing."""


class ModelStore(Protocol):
    """Both block, and raise the LocalLLMError that the client gets."""

    def pull(self, ref: str, on_progress: Callable[[Progress], None]) -> None:
        """Fetch what `ref` names. What `on_progress` raises ends it; what has arrived stays."""

    def remove(self, ref: str) -> None:
        """Remove the files of the model that `ref` names."""
