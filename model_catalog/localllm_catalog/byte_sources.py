"""Sources of a header's bytes: read ranges of a file from the local disk, or from elsewhere through
the caller's class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from localllm_catalog.errors import SourceError


class ByteSource(ABC):
    """A source with a name and a size in bytes. Ranges are best read in pieces of `chunk` bytes."""

    name: str
    size: int
    chunk: int

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises SourceError if they cannot be
        read."""


# Opens a name (a path or URL) as a ByteSource. Raises SourceError if it does not exist.
OpenSource = Callable[[str], ByteSource]


class FileSource(ByteSource):
    """A local file, opened again for each range (a header needs only a few)."""

    chunk = 1 << 20

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            if not Path(path).is_file():
                raise SourceError(f"{path} is not a file", "give the path of a .gguf file")
            self.size = Path(path).stat().st_size
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error

    def read(self, offset: int, length: int) -> bytes:
        try:
            with Path(self.name).open("rb") as file:
                file.seek(offset)
                data = file.read(length)
        except OSError as error:
            raise SourceError(f"{self.name} cannot be read: {error.strerror}") from error
        if len(data) != length:
            raise SourceError(f"{self.name} was truncated by another program during reading")
        return data
