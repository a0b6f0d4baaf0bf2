"""Groups a repository's files into Variants, and picks the one that a reference asks for."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from localllm.errors import DownloadError, ModelFileError
from localllm.library import hub, names, remote_header
from localllm.library.catalog import read_model
from localllm.library.file_kinds import is_gguf
from localllm.library.hub import Listing, RepoFile
from localllm.memory.system import SystemMemory
from localllm_catalog import kinds
from localllm_catalog.kinds import Kind
from localllm_catalog.names import Format
from localllm_catalog.types import Model, Variant

Choose = Callable[["Model"], "Variant"]

# Quants to take without a fit check: the usual compromise first, then quants of similar size.
_USUAL = (
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "IQ4_XS", "Q4_0", "Q4_1", "MXFP4", "MXFP4_MOE", "4BIT",
    "Q5_K_M", "Q6_K", "Q8_0",
)  # fmt: skip
HUB_SOURCE = "hf-api"
_OTHER_REPO_HINT = "look for a repository whose name ends in -GGUF, or for one of mlx-community"
# If a header is unreadable or not a model's, the next file is tried. This limits the headers read.
_MAX_HEADERS = 3
# "model-00001-of-00004.safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-[0-9]+-of-(?P<count>[0-9]{1,5})\.safetensors")
_MAX_SHARDS = 1000
_MLX_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")


@dataclass(frozen=True, slots=True)
class Selection:
    """Files to fetch: one variant's weights in order, their side files, and a projector if
    requested."""

    format: Format
    quant: str
    files: tuple[RepoFile, ...]
    projector: RepoFile | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.files)

    @property
    def weights_bytes(self) -> int:
        return sum(
            f.size_bytes for f in self.files if f.name.lower().endswith((".gguf", ".safetensors"))
        )

    def variant(self, repo: str) -> Variant:
        """These files of `repo` as a catalog Variant."""

        return Variant(self.format, self.quant, repo, self.names, self.weights_bytes)

    @property
    def total_bytes(self) -> int:
        total_bytes = sum(f.size_bytes for f in self.files)
        if self.projector is not None:
            total_bytes += self.projector.size_bytes
        return total_bytes


def selections(listing: Listing) -> list[Selection]:
    """Every complete variant of a repository, smallest first, those in its folders last.

    Incomplete splits, empty files, and files that are no models (projectors, adapters,
    drafters …) are left out.
    """
    found = []
    kinds_of = _kinds(listing)
    files = {f.name: f for f in listing.files if f.name in kinds_of}
    for name, parts in names.complete_models({f.name: f.size_bytes for f in files.values()}):
        if kinds_of[name] in kinds.MODELS:
            quant = names.quant_of(name.rpartition("/")[2]) or names.quant_of(name)
            found.append(Selection(Format.GGUF, quant, tuple(files[part] for part in parts)))
    folder_model = folder_of(listing)
    if folder_model is not None and not found:
        found.append(folder_model)
    return sorted(found, key=_listing_order)


def _listing_order(selection: Selection) -> tuple[int, int]:
    return selection.files[0].name.count("/"), selection.weights_bytes


def _kinds(listing: Listing) -> dict[str, Kind]:
    return kinds.among({f.name: f.size_bytes for f in listing.files if is_gguf(f.name)})


def folder_of(listing: Listing) -> Selection | None:
    """A repository's safetensors with their config and tokenizer; None if it has none of that.

    Raises DownloadError if a shard is missing.
    """
    at_root = [
        f for f in listing.files if "/" not in f.name and f.name.lower().endswith(_MLX_FILES)
    ]
    weights = names.mlx_weights(f.name for f in at_root)
    at_root = [f for f in at_root if f.name in weights or not f.name.endswith(".safetensors")]
    small = [f for f in at_root if not f.name.endswith(".safetensors")]
    large = [f for f in at_root if f.name.endswith(".safetensors")]
    if not large or not any(f.name == "config.json" for f in small):
        return None
    check_complete(_all_shards(weights), weights, listing.repo)
    # Small files first: their errors are found before the large files are downloaded.
    by_name = attrgetter("name")
    ordered = [*sorted(small, key=by_name), *sorted(large, key=by_name)]
    return Selection(Format.MLX, names.mlx_quant_of(listing.repo), tuple(ordered))


def check_complete(shards: Collection[str], listed: Collection[str], repo: str) -> None:
    """Raise DownloadError if a repository lacks shards of its MLX weights."""
    missing = sorted(set(shards) - set(listed))
    if missing:
        names_of = ", ".join(missing[:3])
        raise DownloadError(f"{repo} is incomplete: it has no {names_of}", hint=_OTHER_REPO_HINT)


def _all_shards(weights: Collection[str]) -> set[str]:
    """The names of all shards, by the count in the names of those that are there."""
    shards: set[str] = set()
    for name in weights:
        found = _SHARD.fullmatch(name)
        if found and int(found["count"]) <= _MAX_SHARDS:
            count = int(found["count"])
            digits = len(found["count"])
            shards |= {
                f"{found['stem']}-{n:0{digits}}-of-{found['count']}.safetensors"
                for n in range(1, count + 1)
            }
    return shards


def model_of(listing: Listing, candidates: Sequence[Selection], hint: str | None = None) -> Model:
    """The Model from the header of a GGUF file: the first of `candidates` with a model's header.

    Only the beginning of the file is fetched. Raises DownloadError.
    """
    first: ModelFileError | None = None
    with remote_header.opener(anonymous=listing.anonymous) as open_source:
        for selection in candidates[:_MAX_HEADERS]:
            try:
                return read_model(
                    hub.file_url(listing, selection.files[0].name), open_source=open_source
                )
            except ModelFileError as e:
                first = first or e
    cause = first or ModelFileError("it has no model file", hint="")
    raise DownloadError(
        f"{listing.repo} does not state its model: {cause.message}", hint=hint or cause.hint
    ) from first


def listed(selection: Selection, listing: Listing) -> Variant:
    """The catalog Variant for these files of a listing, including their projector."""
    variant = replace(selection.variant(listing.repo), source=HUB_SOURCE)
    projector = projector_of(listing, selection.files[0].name)
    if projector is None:
        return variant
    return replace(variant, mmproj_file=projector.name, mmproj_bytes=projector.size_bytes)


def projector_of(listing: Listing, model: str, wanted: str = "") -> RepoFile | None:
    """The projector to fetch with the file `model`, or None.

    It is the one in `wanted`, else the model's own F16 projector, else its smallest.
    """
    named = listing.get(wanted)
    if named is not None:
        return named
    found = _kinds(listing)
    models = [name for name, kind in found.items() if kind in kinds.MODELS]
    projectors = [name for name, kind in found.items() if kind == "projector"]
    mine = kinds.own_projectors(model, models, projectors, one_repo=True)
    candidates = {f.name: f for f in listing.files if f.name in mine}
    best = names.best_projector({f.name: f.size_bytes for f in candidates.values()})
    if best is not None:
        return candidates[best]
    return None


def pick(
    listing: Listing,
    *,
    file: str = "",
    quant: str = "",
    described: Callable[[], Model] | None,
    choose: Choose | None,
) -> Selection:
    """The variant that a reference asks for.

    It is picked by file, by quant, by `choose`, else it is the usual one. `described` returns the
    Model whose layers `choose` needs. Raises DownloadError listing the available variants.
    """
    candidates = selections(listing)
    if not candidates:
        raise _no_model(listing, quant)
    if file:
        of_file = _with_file(candidates, file)
        if of_file is not None:
            return of_file
    if quant:
        return _of_quant(candidates, quant, listing)
    if file:
        raise DownloadError(
            f"{listing.repo} has no model file {file}", hint=_listing_text(candidates)
        )
    offered = tuple(s.variant(listing.repo) for s in candidates)
    if len(candidates) > 1 and choose is not None and described is not None:
        variant = choose(replace(described(), variants=offered))
    else:
        variant = usual_variant(offered)
    chosen = next((s for s in candidates if s.names[:1] == variant.files[:1]), candidates[0])
    _warn_of_others(chosen, candidates, listing)
    return chosen


def _warn_of_others(chosen: Selection, candidates: Sequence[Selection], listing: Listing) -> None:
    """Log which other files could have been meant."""
    others = [s.files[0].name for s in candidates if s.quant == chosen.quant and s is not chosen]
    others += [f"{name} (its name can't be used for a file)" for name in listing.left_out]
    if others:
        cause = f"chose {chosen.files[0].name} of {listing.repo} instead of {', '.join(others[:4])}"
        logging.getLogger(__name__).warning(cause)


def _with_file(candidates: Sequence[Selection], file: str) -> Selection | None:
    """The selection with that file, else one with the same file name in another folder."""
    with_file = (s for s in candidates if file in s.names)
    called = (s for s in candidates if names.stem_of(s.files[0].name) == names.stem_of(file))
    return next(with_file, None) or next(called, None)


def _of_quant(candidates: Sequence[Selection], quant: str, listing: Listing) -> Selection:
    exact = [s for s in candidates if s.quant.upper() == quant.upper()]
    same_quant = exact or [s for s in candidates if names.same_quant(quant, s.quant)]
    stems = {names.stem_of(s.files[0].name) for s in same_quant}
    if len(stems) > 1:
        listed = ", ".join(s.files[0].name for s in same_quant[:8])
        raise DownloadError(
            f"{listing.repo} has {len(stems)} models in {quant}: {listed}",
            hint="give the address of one file: "
            f"hf.co/{listing.repo}/blob/main/{same_quant[0].files[0].name}",
        )
    if same_quant:  # the same file in two places is one
        return same_quant[0]
    raw = {names.quant_of(names.raw_part_of(f.name)) for f in listing.files}
    if any(names.same_quant(quant, other) for other in raw):
        raise _no_model(listing, quant)
    raise DownloadError(f"{listing.repo} has no variant {quant}", hint=_listing_text(candidates))


def _no_model(listing: Listing, quant: str) -> DownloadError:
    """The error for a repository without a usable model. It lists the kinds or faults of its
    files."""
    raw = sorted({names.raw_part_of(f.name) for f in listing.files} - {""})
    if raw:
        named = next(
            (w for w in raw if quant and names.same_quant(quant, names.quant_of(w))), raw[0]
        )
        return DownloadError(
            f"{listing.repo} has {named} only in raw parts", hint=names.join_hint(named)
        )
    found = _kinds(listing)
    cause = [
        f"{name} ({kinds.WORDS[kind][0]})"
        for name, kind in found.items()
        if kind not in kinds.MODELS
    ]
    cause += [f"{f.name} (empty)" for f in listing.files if is_gguf(f.name) and not f.size_bytes]
    cause += [f"{name} (a part of an incomplete split)" for name in found if names.split_of(name)]
    cause += [f"{name} (its name can't be used for a file)" for name in listing.left_out]
    if cause:
        return DownloadError(
            f"{listing.repo} has no complete model: {', '.join(cause[:6])}", hint=_OTHER_REPO_HINT
        )
    return DownloadError(
        f"{listing.repo} has no model that runs here: no GGUF files and no MLX folder",
        hint=_OTHER_REPO_HINT,
    )


def usual_variant(variants: Sequence[Variant]) -> Variant:
    """The variant to take if no fit check is available.

    It is the most usual quant among the variants whose weights leave half of this machine's memory
    free. Without a usual one, the biggest of them is taken. If no variant fits, the smallest one is
    taken. GGUF runs everywhere; MLX is taken only if the repository has nothing else.
    """
    choices = [v for v in variants if not v.is_folder] or variants
    limit_bytes = (SystemMemory().total_bytes or 0) // 2
    fitting = [v for v in choices if v.file_bytes <= limit_bytes]
    size = attrgetter("file_bytes")
    if not fitting:
        smallest: Variant = min(choices, key=size)
        return smallest
    by_quant = {v.quant.upper(): v for v in reversed(fitting)}
    for quant in _USUAL:
        if quant in by_quant:
            return by_quant[quant]
    largest: Variant = max(fitting, key=size)
    return largest


def _listing_text(candidates: Sequence[Selection]) -> str:
    listed = ", ".join(s.quant or s.files[0].name for s in candidates[:24])
    if len(candidates) > 24:
        listed += " …"
    return f"it has {listed}"
