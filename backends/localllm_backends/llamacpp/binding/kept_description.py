"""The description of a library's headers, kept on the disk: reading headers takes half a second.

It is kept next to the headers, or in the cache folder if that folder can't be written. Its name
holds the digest of the library, of the headers and of the wanted names.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from localllm_backends.llamacpp.binding.descriptions import Description, WantedNames
from localllm_backends.llamacpp.binding.engine_files import HEADER_PREFIXES, file_identity

STAGING = Path(__file__).parent / "staging.h"
_PREFIX = "localllm-bindings-"
# Raise this number if the same headers are described in another way.
_FORMAT = 2


def description_of(library: Path, headers: Sequence[Path], wanted: WantedNames) -> Description:
    """Return the description of `headers`, which belong to the file `library`.

    Raises HeaderError (c_headers.py) or OSError.
    """
    name = f"{_PREFIX}{_digest(library, headers, wanted)}.json"
    places = [headers[0].parent, _cache_folder()]
    for place in places:
        with suppress(OSError, ValueError, TypeError):
            return Description(**json.loads((place / name).read_text(encoding="utf-8")))
    # Imported here, because both parsers take longer to import than a description to read.
    from localllm_backends.llamacpp.binding.c_headers import read_headers

    description = read_headers([*headers, STAGING], (*HEADER_PREFIXES, STAGING.name), wanted)
    text = json.dumps(asdict(description), separators=(",", ":"))
    for place in places:
        with suppress(OSError):
            _write(place / name, text)
            break
    return description


def _digest(library: Path, headers: Sequence[Path], wanted: WantedNames) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {file_identity(library)} {wanted}".encode())
    others = sorted(path for path in headers[0].parent.glob("*.h") if _may_be_included(path))
    for path in dict.fromkeys([*headers, *others, STAGING]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _may_be_included(path: Path) -> bool:
    return path.name.startswith(HEADER_PREFIXES)


def _cache_folder() -> Path:
    chosen = os.environ.get("LOCALLLM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser() / "bindings"
    import platformdirs

    return Path(platformdirs.user_cache_dir("localllm")) / "bindings"


def _write(path: Path, text: str) -> None:
    """Write the file in one step, since several workers may start at once."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".localllm-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
