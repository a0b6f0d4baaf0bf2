"""Facts about a llama.cpp library, read from its file without loading it."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

_LIBRARY_NAMES = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.dll")
_VERSION = re.compile(r"libllama(?:\.so)?\.(\d+(?:\.\d+){2})(?:\.dylib)?")
# The table LLM_ARCH_NAMES in llama.cpp's src/llama-arch.cpp: its first and last names. Compilers
# store the names in this order.
_FIRST_NAME = b"\0clip\0"
_LAST_NAME = b"(unknown)"
_MAX_TABLE_BYTES = 64 << 10
_ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9._-]{0,60}")


def library_in(folder: Path) -> Path | None:
    """Return the file of libllama in `folder`, or None.

    Packages without development files have only versions in its name.
    """
    plain = [folder / name for name in _LIBRARY_NAMES]
    versioned = sorted([*folder.glob("libllama.so.*"), *folder.glob("libllama.*.dylib")])
    return next((file for file in (*plain, *versioned) if file.is_file()), None)


def version_in(folder: Path) -> str:
    """Return llama.cpp's version by the names of the library's files, or "" without one."""
    library = library_in(folder)
    if library is None:
        return ""
    names = [library.resolve().name, *(file.name for file in folder.glob("libllama*.*.*.*"))]
    versions = [match[1] for match in map(_VERSION.fullmatch, names) if match is not None]
    return next(iter(versions), "")


class Architectures:
    """The architectures of models that a library can read.

    `listed`: the names in its table. The linker may store a name as the end of a longer text, so a
    name can be missing there. It is empty if the table was not found.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.listed = _architecture_names(data)

    def has(self, name: str) -> bool:
        """Return False only if the library can't read models of this architecture."""
        if not self.listed or not _ARCHITECTURE.fullmatch(name):
            return True
        return name in self.listed or name.encode() + b"\0" in self._data


def architectures_of(library: Path) -> Architectures | None:
    """Return the architectures of a library, or None if it can't be read."""
    try:
        status = library.stat()
        return _read(str(library), status.st_size, status.st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _read(library: str, _size_bytes: int, _modified_ns: int) -> Architectures:
    return Architectures(Path(library).read_bytes())


def _architecture_names(data: bytes) -> frozenset[str]:
    start = data.find(_FIRST_NAME)
    if start < 0:
        return frozenset()
    stop = data.find(_LAST_NAME, start, start + _MAX_TABLE_BYTES)
    if stop < 0:
        return frozenset()
    words = data[start:stop].decode("latin-1").split("\0")
    return frozenset(word for word in words if _ARCHITECTURE.fullmatch(word))
