"""What a router asks of the models that are installed but were not named when the server started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from localllm.server.models.served import ServedModel


class Shelf(Protocol):
    """The installed models."""

    def models(self) -> Sequence[ServedModel]:
        """All of them but those named at the start. Answers at once, with what was there when it last looked."""
        ...

    def find(self, name: str) -> ServedModel | None:
        """The model that `name` means (its name, file name, repository, catalog id, each also with `:quant`), whether
        named at the start or not. Looks at the disk: called in a thread where that matters. Never takes a path."""
        ...
