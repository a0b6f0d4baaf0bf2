"""Versions and entry points of installed packages, from the names and files in their metadata.

importlib.metadata does the same, but importing it and asking it takes 20 ms of each start.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

# Folders of metadata that installers write next to a package.
_ENDINGS = (".dist-info", ".egg-info")


@cache
def _metadata_folders(search_path: tuple[str, ...]) -> tuple[Path, ...]:
    found: list[Path] = []
    for folder in search_path:
        with suppress(OSError):
            names = os.listdir(folder or ".")
            found += [Path(folder, name) for name in sorted(names) if name.endswith(_ENDINGS)]
    return tuple(found)


def version(package: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    wanted = _plain(package)
    for folder in _metadata_folders(tuple(sys.path)):
        name, _, rest = folder.stem.partition("-")
        if rest and _plain(name) == wanted:
            return rest.partition("-")[0]
    return None


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def entry_points(group: str) -> dict[str, str]:
    """Return the objects that packages register in `group`: "module:attribute" by name, sorted.

    If two packages register the same name, the one that is first on Python's path counts.
    """
    found: dict[str, str] = {}
    for folder in _metadata_folders(tuple(sys.path)):
        with suppress(OSError, UnicodeDecodeError):
            text = (folder / "entry_points.txt").read_text(encoding="utf-8")
            for name, value in _entries(text, group):
                found.setdefault(name, value)
    return dict(sorted(found.items()))


def _entries(text: str, group: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of one section of an entry_points.txt."""
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line
        elif section == f"[{group}]" and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            # Names of extras follow in brackets.
            yield name.strip(), value.partition("[")[0].strip()
