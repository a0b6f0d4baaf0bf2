"""Weight files that can't be loaded: cut short, or of another kind by their first bytes.

Only headers are read, and each only once while its file stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from localllm.library.cached_facts import CachedFacts, key_of
from localllm_catalog.errors import CatalogError, PartialFileError

_kept = CachedFacts("partial-files.json")


def reasons(files: Iterable[Path]) -> dict[Path, str]:
    """Why a file can't be loaded, for those of `files` that can't: GGUF or safetensors.

    A file that can't be read, or that has another fault, is left to the engine, which names it.
    Reading the header of a model with 150,000 tokens takes 30 ms.
    """
    known = _known()
    found: dict[Path, str] = {}
    added: dict[str, str] = {}
    for file in files:
        try:
            key = key_of(file)
        except OSError:
            continue
        if key not in known:
            known[key] = added[key] = _reason(file)
        if known[key]:
            found[file] = known[key]
    if added:
        _kept.add(added)
    return found


@cache
def _known() -> dict[str, str]:
    """The reasons by the key of a file ("": it is whole), read once by each process."""
    return {key: why for key, why in _kept.facts().items() if isinstance(why, str)}


def _reason(file: Path) -> str:
    from localllm_catalog import gguf, safetensors

    try:
        if file.suffix == ".safetensors":
            safetensors.check_length(file)
        else:
            gguf.check_length(file)
    except PartialFileError as e:
        message = e.message.removeprefix(f"{file}: ")
        return f"{message} ({e.hint})"
    except CatalogError:
        pass
    return ""
