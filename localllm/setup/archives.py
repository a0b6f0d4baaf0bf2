"""Unpack an archive of llama.cpp's libraries, and read which systems they run on.

Only the files of shared libraries and licences are taken. Each gets its plain name in one folder,
so no name in an archive can lead out of it.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from localllm.setup.builds import SetupError
from localllm.setup.host import Version

_LIBRARY_OR_LICENCE = re.compile(
    r"(lib[\w.+-]+\.so(\.\d+){0,3}|lib[\w.+-]+\.dylib|[\w.+-]+\.dll|LICENSE[\w.-]*)", re.ASCII
)
_MAX_FILES = 400
MAX_BYTES = 8 << 30
_MAX_NAME_CHARS = 120
_GLIBC = re.compile(rb"GLIBC_2\.(\d{1,3})\0")
# mach-o/loader.h
_MACH_O_64 = 0xFEEDFACF
_BUILD_VERSION = 0x32
_MACH_HEADER_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Member:
    """A file in an archive, or a link to the file with the name `target`."""

    name: str
    size_bytes: int
    open: Callable[[], IO[bytes]] | None
    target: str = ""


def unpack(archive: Path, folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Unpack the libraries of `archive` (.zip or .tar.gz) into `folder`, up to `max_bytes`.

    Raises SetupError if the archive is damaged, too large, or holds no library.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if archive.name.endswith(".zip"):
            with zipfile.ZipFile(archive) as zip_file:
                n_files = _write_members(_zip_members(zip_file), folder, max_bytes)
        else:
            with tarfile.open(archive, "r:gz") as tar_file:
                n_files = _write_members(_tar_members(tar_file), folder, max_bytes)
    except (OSError, EOFError, ValueError, tarfile.TarError, zipfile.BadZipFile) as e:
        raise SetupError(
            f"the archive {archive.name} can't be unpacked: {e}",
            hint="check the free space of the disk, then run the command again",
        ) from e
    if not n_files:
        raise SetupError(f"the archive {archive.name} holds no library")


def _write_members(members: Iterator[_Member], folder: Path, max_bytes: int) -> int:
    """Write the members into `folder`, and return how many there were."""
    links: dict[str, str] = {}
    files: set[str] = set()
    total_bytes = 0
    for member in members:
        total_bytes += member.size_bytes
        if len(files) + len(links) >= _MAX_FILES or total_bytes > max_bytes:
            raise ValueError("it holds more than an engine has")
        if member.open is None:
            links[member.name] = member.target
            continue
        with member.open() as source, (folder / member.name).open("wb") as file:
            shutil.copyfileobj(source, file)
        files.add(member.name)
    for name, target in links.items():
        if name in files:
            continue
        resolved = _link_target(target, links, files)
        (folder / name).unlink(missing_ok=True)
        if os.name == "nt":
            shutil.copy(folder / resolved, folder / name)
        else:
            (folder / name).symlink_to(resolved)
    return len(files)


def _link_target(target: str, links: dict[str, str], files: set[str]) -> str:
    """Return the file that a link leads to. Raises ValueError if it is not in the archive."""
    for _ in range(len(links) + 1):
        if target in files:
            return target
        target = links.get(target, "")
    raise ValueError("a link in it leads to no file of the archive")


def _tar_members(tar_file: tarfile.TarFile) -> Iterator[_Member]:
    for member in tar_file:
        name = _plain_name(member.name)
        if not name:
            continue
        if member.issym() or member.islnk():
            yield _Member(name, 0, None, PurePosixPath(member.linkname).name)
        elif member.isreg():
            yield _Member(name, member.size, partial(_open_in_tar, tar_file, member))


def _open_in_tar(tar_file: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = tar_file.extractfile(member)
    if content is None:
        raise ValueError(f"{member.name[:80]!r} is no file")
    return content


def _zip_members(zip_file: zipfile.ZipFile) -> Iterator[_Member]:
    for info in zip_file.infolist():
        name = _plain_name(info.filename)
        if name and not info.is_dir():
            yield _Member(name, info.file_size, partial(zip_file.open, info))


def _plain_name(path: str) -> str:
    """Return the file's name without folders, or "" if the file is not wanted."""
    name = PurePosixPath(path.replace("\\", "/")).name
    if len(name) > _MAX_NAME_CHARS or not _LIBRARY_OR_LICENCE.fullmatch(name):
        return ""
    return name


def too_new(folder: Path, glibc: Version | None, macos: Version | None) -> str:
    """Return the reason why the libraries in `folder` can't run on this system, or "".

    `glibc` and `macos` are this system's versions, or None.
    """
    for file in sorted(folder.iterdir()):
        if file.is_symlink() or not file.is_file():
            continue
        if ".so" in file.name and glibc is not None:
            needs = glibc_of(file)
            if needs is not None and needs > glibc:
                own_version = f"{glibc[0]}.{glibc[1]}"
                message = f"{file.name} needs glibc {needs[0]}.{needs[1]}"
                return f"{message}, and this system has {own_version}"
        if file.suffix == ".dylib" and macos is not None:
            needs = macos_of(file)
            if needs is not None and needs > macos:
                own_version = f"{macos[0]}.{macos[1]}"
                message = f"{file.name} needs macOS {needs[0]}.{needs[1]}"
                return f"{message}, and this Mac has {own_version}"
    return ""


def glibc_of(file: Path) -> Version | None:
    """Return the newest version of glibc whose symbols a library uses, or None."""
    minors = [int(minor) for minor in _GLIBC.findall(file.read_bytes())]
    if not minors:
        return None
    return 2, max(minors)


def macos_of(file: Path) -> Version | None:
    """Return the oldest macOS that a Mach-O library runs on, or None if it doesn't state one."""
    data = file.read_bytes()
    if len(data) < _MACH_HEADER_BYTES:
        return None
    header: tuple[Any, ...] = struct.unpack_from("<8I", data)
    if header[0] != _MACH_O_64:
        return None
    offset = _MACH_HEADER_BYTES
    for _ in range(header[4]):
        if offset + 16 > len(data):
            return None
        command, size, _, oldest = struct.unpack_from("<4I", data, offset)
        if command == _BUILD_VERSION:
            return oldest >> 16, oldest >> 8 & 0xFF
        offset += max(8, size)
    return None
