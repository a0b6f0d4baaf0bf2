"""Parses file and repository names (quants, splits, projectors) and MODEL references."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from localllm.errors import ModelFileError, ModelNotFoundError, UsageError
from localllm.model_names import without_tag
from localllm_catalog.names import bare as bare
from localllm_catalog.names import quant_of as quant_of
from localllm_catalog.names import safe_file as safe_file
from localllm_catalog.names import safe_repo as safe_repo
from localllm_catalog.names import shown as shown
from localllm_catalog.names import split_of as split_of
from localllm_catalog.names import split_parts as split_parts

if TYPE_CHECKING:
    from localllm_catalog.types import Model

_MLX_QUANT = re.compile(
    r"(?:^|[-_.])((?:[2-8]bit)|mxfp[48]|nvfp4|bf16|fp16)(?=[-_.]|$)", re.IGNORECASE
)
_REVISION = re.compile(r"[A-Za-z0-9_][\w.-]{0,99}", re.ASCII)
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_REFERENCE_HINT = (
    "give a catalog id (qwen3-8b), a repository (org/name, org/name:Q4_K_M), "
    "an hf.co URL, or a path"
)


def endpoint() -> str:
    """Address of the hub, or of the mirror in HF_ENDPOINT.

    Raises UsageError if it is not an http(s) address.
    """
    address = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"HF_ENDPOINT is not an http address: {address[:100]!r}", hint="correct it or unset it"
        )
    return address


def mlx_quant_of(name: str) -> str:
    """The quant in an MLX repository's name ("4bit", "mxfp4"), or ""."""
    found = _MLX_QUANT.findall(name)
    if found:
        return str(found[-1]).lower()
    return ""


def mlx_weights(names: Iterable[str]) -> list[str]:
    """The .safetensors files of a folder that MLX reads: model*.safetensors if there are any.

    Folders often also hold the same weights in their maker's own format (consolidated.safetensors).
    """
    weights = [name for name in names if name.endswith(".safetensors")]
    return [name for name in weights if name.startswith("model")] or weights


def same_quant(wanted: str, quant: str) -> bool:
    """True if `wanted` means `quant`, ignoring case, unsloth's "UD-" prefix, and the P of FP16."""
    a, q = (re.sub("^FP(?=16|32)", "F", text.upper()) for text in (wanted, quant))
    return a == q or a == q.removeprefix("UD-")


def check_quant(model: Model, wanted: str) -> None:
    """Raise ModelNotFoundError, listing the existing quants, if the catalog lacks `wanted`.

    "" matches any quant.
    """
    if not wanted or any(same_quant(wanted, v.quant) for v in model.variants):
        return
    hint = "the catalog lists no files of it"
    if model.variants:
        quants = ", ".join(dict.fromkeys(v.quant for v in model.variants))
        others = f"org/name:{wanted[:40]}"
        hint = f"listed quants: {quants}; for others in a repository, give its name: {others}"
    raise ModelNotFoundError(f"{model.name} has no quant {wanted[:40]!r}", hint=hint)


def check_not_empty(*references: str) -> None:
    """Raise UsageError if a reference is empty, most likely from an unset shell variable."""
    if any(not reference.strip() for reference in references):
        raise UsageError("the model's name is empty", hint=_REFERENCE_HINT)


def is_first_part(name: str) -> bool:
    """False for a later part of a split GGUF."""
    split = split_of(name)
    return split is None or split[1] == 1


def complete_models(sizes: Mapping[str, int]) -> Iterator[tuple[str, list[str]]]:
    """The first part and all parts of each complete GGUF model, given file sizes by name.

    A model is complete if all its parts exist and are not empty.
    """
    for name in sizes:
        parts = split_parts(name)
        if is_first_part(name) and all(sizes.get(part) for part in parts):
            yield name, parts


def best_projector(sizes: Mapping[str, int]) -> str | None:
    """The best of several projectors, given their sizes by name.

    Prefers F16 as published, else the smallest. Empty files do not count.
    """

    def place(name: str) -> tuple[bool, int]:
        is_f16 = "f16" in name.lower().replace("bf16", "")
        return not is_f16, sizes[name]

    non_empty = [name for name, size_bytes in sizes.items() if size_bytes]
    return min(non_empty, key=place, default=None)


_RAW_PART = re.compile(
    r"(?P<whole>.+\.gguf)(?:[.-]split-?[a-z0-9]{1,5}|[.-]part-?[0-9a-z]{1,5}(?:-?of-?[0-9]{1,3})?|\.[0-9]{2,3})",
    re.IGNORECASE,
)


def raw_part_of(name: str) -> str:
    """The file of which `name` is a raw part, or "".

    Examples: "m.gguf" for "m.gguf-split-a" and for "m.gguf.part1of2".
    """
    match = _RAW_PART.fullmatch(name)
    if match:
        return match["whole"]
    return ""


def join_hint(joined: str) -> str:
    """A hint with the command that joins raw parts into the file `joined`."""
    command = f"cat '{joined.rpartition('/')[2]}'?* > joined.gguf"
    return f"the file was cut into parts: download all parts and join them in order: `{command}`"


def stem_of(name: str) -> str:
    """A GGUF's name without folder, split number and suffix, as shown in lists."""
    name = name.replace("\\", "/").rpartition("/")[2]
    split = split_of(name)
    if split is not None:
        return split[0]
    if name.lower().endswith(".gguf"):
        return name[: -len(".gguf")]
    return name


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A parsed MODEL reference, before any lookup.

    If `repo` is "", `name` is a catalog id or a local name, else the part after the slash. `file`
    is set by URLs of one file, `revision` by URLs with a revision. In a reference for a download,
    `name` is a catalog id or "", and `projector` is the projector file that the catalog lists, if
    any.
    """

    text: str
    name: str
    repo: str = ""
    quant: str = ""
    file: str = ""
    revision: str = ""
    projector: str = ""


def parse(text: str) -> ModelReference:
    """Parse a reference that is not a path: id[:quant], org/name[:quant], or a URL.

    URLs must be of the hub or of the mirror in HF_ENDPOINT. Raises UsageError for other URLs and
    for anything that could hide a path.
    """
    text = without_tag(text.strip())
    if "://" in text or text.split("/", 1)[0].lower() in _HUB_HOSTS:
        return _parse_url(text)
    name, _, quant = text.partition(":")
    if "/" in name:
        if not safe_repo(name):
            raise UsageError(f"{name[:100]!r} is not a repository name", hint=_REFERENCE_HINT)
        return ModelReference(text, name.partition("/")[2], name, quant)
    if not name or ".." in name or "\\" in name:
        raise UsageError(f"{text[:100]!r} is not a model reference", hint=_REFERENCE_HINT)
    return ModelReference(text, name, "", quant)


def parsed(text: str) -> ModelReference | None:
    """Return `parse` of this text, or None if it raises an error."""
    try:
        return parse(text)
    except UsageError:
        return None


def _parse_url(text: str) -> ModelReference:
    address = text if "://" in text else f"https://{text}"
    url = urlsplit(address)
    hosts = (*_HUB_HOSTS, urlsplit(endpoint()).hostname)
    if url.scheme not in ("http", "https") or url.hostname not in hosts:
        raise UsageError(
            f"{text[:100]!r} is not an address of the model hub",
            hint="only hub addresses work here; download other files yourself and give their path",
        )
    path, _, quant = url.path.strip("/").partition(":")
    parts = [unquote(part) for part in path.split("/")]
    repo = "/".join(parts[:2])
    rest = parts[2:]
    if len(parts) < 2 or not safe_repo(repo):
        raise UsageError(
            f"{text[:100]!r} contains no repository name",
            hint="repository addresses look like hf.co/org/name",
        )
    found = ModelReference(text, parts[1], repo, quant)
    if rest:
        return _below_repository(found, rest)
    return found


def _below_repository(found: ModelReference, parts: list[str]) -> ModelReference:
    """`found` with the parts of a URL that follow the repository.

    These are blob/REVISION/FILE, tree/REVISION/FOLDER and the like.
    """
    kind = parts[0]
    revision = "".join(parts[1:2])
    file = "/".join(parts[2:])
    if kind not in ("blob", "resolve", "tree", "raw") or len(parts) < 2:
        raise UsageError(
            f"{found.text[:100]!r} is not the address of a model or a file", hint=_REFERENCE_HINT
        )
    if _REVISION.fullmatch(revision) is None or ".." in revision or (file and not safe_file(file)):
        raise UsageError(
            f"{found.text[:100]!r} contains an invalid repository name", hint=_REFERENCE_HINT
        )
    if revision == "main":
        revision = ""
    named = replace(found, revision=revision)
    if kind == "tree":
        # In GGUF repositories, a folder usually holds one quant ("UD-Q4_K_XL").
        return replace(named, quant=found.quant or quant_of(file))
    return replace(named, file=file)


# The engine loads Q2_0 files of Bonsai 2 but generates noise. It does not know the types of the
# others: they are made for the makers' own build (https://github.com/lucasew/nixcfg/pull/483).
# Bonsai and Bonsai 27B are not affected.
_BONSAI_2 = re.compile(r"bonsai[-_. ]?2(?![0-9.])", re.IGNORECASE)


def check_readable(*names: str) -> None:
    """Raise ModelFileError if a name belongs to a family that the engine silently misreads."""
    if any(_BONSAI_2.search(name) for name in names):
        raise ModelFileError(
            "llama.cpp misreads Bonsai 2: it loads some of the files, but generates noise",
            hint="run it with its publisher's build (PrismML's llama.cpp), or use Qwen3.8 27B: "
            "localllm pull qwen3.8-27b",
        )
