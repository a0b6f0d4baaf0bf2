"""Where models are fetched to and removed from. The command line hands one over where clients may do that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


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
