"""Find llama.cpp's libraries, and the headers that belong to them. Loads no library."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path

from localllm_backends.fingerprints import SAMPLED_BYTES, fingerprint

# A folder with libraries of llama.cpp, in place of those of llama-cpp-python.
OTHER_FOLDER = "LLAMA_CPP_LIB_PATH"
# Where an installation has the headers, as seen from the folder of its libraries. The last two are
# those of llama-cpp-python and of a build of llama.cpp in `build/bin`.
_HEADER_FOLDERS = ("../include", "include", "../../include")
# Folders in llama.cpp's source in which its other headers are, as seen from `include`.
_SOURCE_FOLDERS = ("../ggml/include", "../tools/mtmd")
_HEADERS = (
    "llama.h", "ggml.h", "ggml-backend.h", "ggml-cpu.h", "ggml-rpc.h", "gguf.h", "mtmd.h",
)  # fmt: skip
# Files of llama.cpp's libraries, and their names without prefix and version.
_LIBRARY = re.compile(
    r"(?:lib)?((?:llama|ggml|mtmd)[\w-]*?)(?:\.[\d.]+)?\.(?:so|dll|dylib)(?:\.[\d.]+)?"
)
# Headers that others include start with one of these.
HEADER_PREFIXES = ("llama", "ggml", "gguf", "mtmd")


def package_folder() -> Path | None:
    """Return the folder of the installed package llama_cpp; None if it is not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    # Files that are left after an uninstallation are a package without an origin.
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def library_folder() -> Path | None:
    """Return the folder with the libraries of the llama.cpp in use; None without a llama.cpp."""
    other = os.environ.get(OTHER_FOLDER)
    if other:
        return Path(other).expanduser()
    package = package_folder()
    return None if package is None else package / "lib"


def library_path(name: str) -> Path | None:
    """Return the path of a library of the llama.cpp in use; None if it was built without it."""
    folder = library_folder()
    return None if folder is None else library_in(folder, name)


def library_in(folder: Path, name: str) -> Path | None:
    """Return the file of the library `name` ("llama", "mtmd") in `folder`, or None."""
    if sys.platform == "win32":
        plain = [f"{name}.dll", f"lib{name}.dll"]
    elif sys.platform == "darwin":
        plain = [f"lib{name}.dylib", f"lib{name}.so"]
    else:
        plain = [f"lib{name}.so"]
    for file in plain:
        if (folder / file).is_file():
            return folder / file
    # Libraries without development files have only versions in their names.
    versioned = [*folder.glob(f"lib{name}.so.*"), *folder.glob(f"lib{name}.*.dylib")]
    return min(versioned, default=None)


def libraries_in(folder: Path) -> list[Path]:
    """Return llama.cpp's libraries in `folder`, each once."""
    names: set[str] = set()
    for path in folder.glob("*"):
        named = _LIBRARY.fullmatch(path.name)
        if named and path.is_file():
            names.add(named[1])
    found = [library_in(folder, name) for name in sorted(names)]
    return [path for path in found if path is not None]


def headers_for(folder: Path) -> list[Path]:
    """Return the headers that belong to the libraries in `folder`, `llama.h` first; [] without
    them.

    Libraries without headers of their own are read with those of the installed llama-cpp-python.
    """
    candidates = [folder / place for place in _HEADER_FOLDERS]
    package = package_folder()
    if package is not None:
        candidates.append(package.parent / "include")
    for include in candidates:
        if (include / "llama.h").is_file():
            return _headers_in(include.resolve())
    return []


def _headers_in(include: Path) -> list[Path]:
    folders = [include, *(include / place for place in _SOURCE_FOLDERS)]
    found = []
    for name in _HEADERS:
        present = [folder / name for folder in folders if (folder / name).is_file()]
        found.extend(present[:1])
    return found


@cache
def file_identity(path: Path) -> str:
    """Return the identity of a library's content, computed once per process."""
    if path.stat().st_size > SAMPLED_BYTES:
        return fingerprint(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]
