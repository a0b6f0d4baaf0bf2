"""Where the bytes of a header come from: a range of a file at a time, of this disk or of whatever a
caller reads it from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from localllm_catalog.errors import SourceError


class ByteSource(ABC):
    """Something with a name, a size in bytes, and ranges that can be read, best `chunk` bytes at a
    time."""

    name: str
    size: int
    chunk: int

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; SourceError if they cannot be had."""


# From a name (a path, an address) to what reads it; raises SourceError if it is not there.
OpenSource = Callable[[str], ByteSource]


class FileSource(ByteSource):
    """A local file, opened for each range (headers take a handful of them)."""

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
            raise SourceError(f"{self.name} became shorter while it was read")
        return data
