"""Names of formats, repositories and files: check that they are safe as paths, find their quant,
and compare models by name.

Names from the user's files and from hubs are untrusted.
"""

from __future__ import annotations

import re
from enum import StrEnum, auto

from localllm_catalog.errors import BadCatalogError


class Format(StrEnum):
    """The formats that weights are published in, by their names in the catalog's files."""

    GGUF = auto()
    MLX = auto()

    @property
    def is_folder(self) -> bool:
        """True if a model is a folder of shards with a config.json. Its quant's name then gives the
        bits of all weights.

        False if it is one file (or its splits) with its own header and a mixture of types.
        """
        return self is Format.MLX


FOLDER_FORMATS = frozenset(form for form in Format if form.is_folder)

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_PACKAGE = re.compile(r"pypi:[a-z0-9][a-z0-9.-]{0,63}", re.ASCII)
# Characters that file systems or this program do not treat as part of a name.
_FORBIDDEN_CHARACTERS = frozenset("/\\:<>|?*")
_MAX_PARTS = 16
_MAX_PART_BYTES = 255
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(
    r"(?:^|[^A-Za-z0-9])((?:UD-)?(?:I?Q[1-8]_[A-Z0-9_]+|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))(?=[^A-Za-z0-9_]|$)",
    re.IGNORECASE,
)
# Additions to the model's name in published names: "Qwen_Qwen3-8B-UD-Q4_K_XL-00001-of-00002.gguf",
# "…-4bit", "…-GGUF".
_NAME_ADDITIONS = re.compile(
    r"\.gguf$|-[0-9]{5}-of-[0-9]{5}$|[-.](?:UD-)?(?:I?Q[1-8]_[A-Z0-9_]+|TQ[12]_0|MXFP4(?:_MOE|-Q8)?|NVFP4|BF16|F16|F32)$"
    r"|-(?:MLX|GGUF)$|-[2-8]bit$",
    re.IGNORECASE,
)


def safe_repo(repo: str) -> bool:
    """Return whether a name is "org/name" without path tricks."""
    return _REPO.fullmatch(repo) is not None and ".." not in repo


def safe_file(name: str) -> bool:
    """Return whether a name is a plain relative path inside a repository.

    Its parts must be printable (in any script), not hidden, and must not lead outside.
    """
    parts = name.split("/")
    return len(parts) <= _MAX_PARTS and all(map(_is_part, parts))


def _is_part(part: str) -> bool:
    return (
        part.isprintable()
        and part == part.strip(" ")
        and not part.startswith((".", "-", "~"))
        and 0 < len(part.encode("utf-8", "replace")) <= _MAX_PART_BYTES
        and ".." not in part
        and not _FORBIDDEN_CHARACTERS & set(part)
    )


def check_repo(repo: str) -> str:
    """Return `repo` if it is "org/name" or "pypi:package". Raises BadCatalogError otherwise."""
    if not safe_repo(repo) and (_PACKAGE.fullmatch(repo) is None or ".." in repo):
        raise BadCatalogError(
            f"{repo[:80]!r} is not a repository name", 'repositories look like "org/name"'
        )
    return repo


def check_file(name: str) -> str:
    """Return `name` if it is a safe file name. Raises BadCatalogError for .., roots, drives and the
    like."""
    if not safe_file(name):
        raise BadCatalogError(
            f"{name[:80]!r} is not a file name of a repository", "names are relative, without .."
        )
    return name


def shown(name: str) -> str:
    """Return a name that is safe to print and type. Unprintable characters (control characters,
    direction marks, invalid bytes) become "?"."""
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() else "?" for character in name)


def quant_of(name: str) -> str:
    """Return the quant in a GGUF's name ("Q4_K_M", "UD-Q4_K_XL"), or ""."""
    quants = _QUANT.findall(re.sub(r"(?i)\.gguf$", "", name))
    if quants:
        return re.sub("^FP", "F", str(quants[-1]).upper())
    return ""


def split_of(name: str) -> tuple[str, int, int] | None:
    """Return (stem, number, count) of a split GGUF's name ("m-00001-of-00003.gguf"), or None for a
    single file."""
    match = _SPLIT.fullmatch(name)
    if match is None or not 1 <= int(match["no"]) <= int(match["count"]):
        return None
    return match["stem"], int(match["no"]), int(match["count"])


def split_parts(name: str) -> list[str]:
    """Return the names of all parts of the split GGUF that `name` belongs to, or only `name` for a
    single file."""
    split = split_of(name)
    if split is None:
        return [name]
    stem, _, count = split
    return [f"{stem}-{n:05d}-of-{count:05d}{name[-len('.gguf') :]}" for n in range(1, count + 1)]


def without_quant(name: str) -> str:
    """Return a model's name without quant, split number and ending ("m.Q8_0.gguf": "m")."""
    while (shorter := _NAME_ADDITIONS.sub("", name)) != name:
        name = shorter
    return name


def bare(name: str) -> str:
    """Reduce a name to the part that two spellings of a model share: no folder, publisher, quant,
    ending or punctuation."""
    text = without_quant(name.replace("\\", "/").rstrip("/").rpartition("/")[2])
    publisher, _, rest = text.partition("_")
    if rest and "-" not in publisher:
        text = rest
    return re.sub(r"[^a-z0-9.]", "", text.lower())
