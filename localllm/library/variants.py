"""Groups a repository's files into Variants, and picks the one a reference asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from localllm.errors import DownloadError, ModelFileError
from localllm.library import hub, names
from localllm.library.catalog import read_model
from localllm.library.hub import Listing, RepoFile

if TYPE_CHECKING:
    from localllm_catalog.types import Model, Variant

_T = TypeVar("_T")
Choose = Callable[["Model"], "Variant"]

# Without anybody to ask what fits: the usual compromise first, then its neighbours in size.
_USUAL = (
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "IQ4_XS", "Q4_0", "Q4_1", "MXFP4", "MXFP4_MOE", "4BIT", "Q5_K_M", "Q6_K", "Q8_0",
)  # fmt: skip
_MLX_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")


@dataclass(frozen=True, slots=True)
class Selection:
    """Files to bring: one variant's weights in order, what belongs to them, and its projector if asked for."""

    format: str
    quant: str
    files: tuple[RepoFile, ...]
    projector: RepoFile | None = None

    @property
    def weights_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files if f.name.lower().endswith((".gguf", ".safetensors")))

    @property
    def total_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files) + (self.projector.size_bytes if self.projector else 0)


def selections(listing: Listing) -> list[Selection]:
    """Every whole variant of a repository, smallest first. Splits of which a part is missing are left out."""
    found = []
    for file in listing.files:
        if not file.name.lower().endswith(".gguf") or names.is_projector(file.name):
            continue
        folder, _, base = file.name.rpartition("/")
        split = names.split_of(base)
        parts: list[RepoFile | None] = [file]
        if split is not None:
            stem, number, count = split
            if number != 1:
                continue
            prefix = f"{folder}/" if folder else ""
            parts = [listing.get(f"{prefix}{stem}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
        whole = tuple(p for p in parts if p is not None)
        if len(whole) == len(parts):
            found.append(Selection("gguf", names.quant_of(base) or names.quant_of(file.name), whole))
    folder_model = _mlx(listing)
    if folder_model is not None and not found:
        found.append(folder_model)
    return sorted(found, key=lambda s: s.weights_bytes)


def _mlx(listing: Listing) -> Selection | None:
    at_root = [f for f in listing.files if "/" not in f.name and f.name.lower().endswith(_MLX_FILES)]
    if not any(f.name.endswith(".safetensors") for f in at_root) or not any(f.name == "config.json" for f in at_root):
        return None
    # The small files first: what is wrong with them is known before the large ones travel.
    ordered = sorted(at_root, key=lambda f: (f.name.endswith(".safetensors"), f.name))
    return Selection("mlx", names.mlx_quant_of(listing.repo), tuple(ordered))


def model_of(listing: Listing, selection: Selection, hint: str | None = None) -> Model:
    """The Model that the header of a GGUF file says, of which only the beginning is fetched. Raises DownloadError."""
    key = {k: v for k, v in hub.headers().items() if k == "authorization"}
    try:
        return read_model(hub.file_url(listing, selection.files[0].name), headers=key)
    except ModelFileError as e:
        raise DownloadError(f"{listing.repo} does not say what model it holds: {e.message}", hint=hint or e.hint) from e


def projector_of(listing: Listing, wanted: str = "") -> RepoFile | None:
    """The projector to bring: the one named, else F16, else the smallest; None if the repository has none."""
    if wanted and (named := listing.get(wanted)) is not None:
        return named
    candidates = [f for f in listing.files if f.name.lower().endswith(".gguf") and names.is_projector(f.name)]

    def rank(file: RepoFile) -> tuple[bool, int]:
        return "f16" not in file.name.lower().replace("bf16", ""), file.size_bytes

    return min(candidates, key=rank, default=None)


def pick(
    listing: Listing, *, file: str = "", quant: str = "", described: Callable[[], Model] | None, choose: Choose | None
) -> Selection:
    """The variant a reference asks for: by file, by quant, by what `choose` says of the model, else the usual one.

    `described` gives the Model whose layers `choose` judges by. Raises DownloadError naming what there is.
    """
    there = selections(listing)
    if not there:
        raise DownloadError(
            f"{listing.repo} holds no model that runs here: neither GGUF files nor an MLX folder",
            hint="look for a repository whose name ends in -GGUF, or for one of mlx-community",
        )
    if file:
        of_file = [s for s in there if any(f.name == file for f in s.files)]
        of_file = of_file or [s for s in there if names.stem_of(s.files[0].name) == names.stem_of(file)]
        if of_file:
            return of_file[0]
        if not quant:
            raise DownloadError(f"{listing.repo} has no model file {file}", hint=_what_there_is(there))
    if quant:
        exact = [s for s in there if s.quant.upper() == quant.upper()]
        near = exact or [s for s in there if names.same_quant(quant, s.quant)]
        if not near:
            raise DownloadError(f"{listing.repo} has no variant {quant}", hint=_what_there_is(there))
        return near[0]
    if len(there) > 1 and choose is not None and described is not None:
        return _chosen(there, listing, described(), choose)
    return _usual(there, lambda s: (s.quant, s.weights_bytes), sensible_bytes())


def _usual(choices: Sequence[_T], facts: Callable[[_T], tuple[str, int]], limit_bytes: int) -> _T:
    """The most usual quant of those whose weights stay below `limit_bytes`; of unusual ones the biggest; else the
    smallest there is. `facts` gives quant and bytes of a choice."""
    fitting = [c for c in choices if facts(c)[1] <= limit_bytes]
    if not fitting:
        return min(choices, key=lambda c: facts(c)[1])
    for usual in _USUAL:
        for choice in fitting:
            if facts(choice)[0].upper() == usual:
                return choice
    return max(fitting, key=lambda c: facts(c)[1])


def sensible_bytes() -> int:
    """Half of this machine's memory: weights above that leave too little for a context and everything else."""
    import psutil

    return int(psutil.virtual_memory().total) // 2


def _chosen(there: list[Selection], listing: Listing, model: Model, choose: Choose) -> Selection:
    """What `choose` picks of the variants that are really there, with their real sizes."""
    from localllm_catalog.types import Variant

    offered = {
        selection.files[0].name: Variant(
            "mlx" if selection.format == "mlx" else "gguf",
            selection.quant,
            listing.repo,
            tuple(f.name for f in selection.files),
            selection.weights_bytes,
        )
        for selection in there
    }
    variant = choose(replace(model, variants=tuple(offered.values())))
    return next((s for s in there if variant.files and s.files[0].name == variant.files[0]), there[0])


def usual_variant(model: Model) -> Variant:
    """The catalog's variant to take when nobody is asked what fits: a usual GGUF whose weights leave half the memory
    free. Raises DownloadError if the hub has none of the model."""
    on_hub = [v for v in model.variants if not v.repo.startswith("pypi:")]
    if not on_hub:
        raise DownloadError(f"{model.name} has no files on the hub", hint="see `localllm models info`")
    # GGUF runs everywhere; MLX is taken where it is all there is, or where somebody chooses it.
    ggufs = [v for v in on_hub if v.format == "gguf"]
    return _usual(ggufs or on_hub, lambda v: (v.quant, v.file_bytes), sensible_bytes())


def _what_there_is(there: list[Selection]) -> str:
    listed = ", ".join(s.quant or s.files[0].name for s in there[:24])
    return f"it has {listed}{' …' if len(there) > 24 else ''}"
