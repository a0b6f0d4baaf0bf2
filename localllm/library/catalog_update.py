"""Updates the catalog from the hub: files, exact sizes and new models, in a user catalog file.

The file overrides the shipped catalog, like any other file of that folder. It is read first, so the
user's own files override it. Deleting the file undoes the update.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import paths
from localllm.errors import DownloadError, ModelNotFoundError
from localllm.library import names, variants
from localllm.library.catalog import UPDATE_FILE
from localllm.library.hub import HubUnreachableError, Listing
from localllm_catalog.names import Format

if TYPE_CHECKING:
    from localllm_catalog.types import Model, Variant

# If a file's size differs more than this from the size computed from the model's shapes, it is
# something else: a draft head, a part, another model.
_PLAUSIBLE = 0.4
_MIN_BITS = 1.0
_MAX_BITS = 20.0
# Sizes that differ by less than this are the same file, counted in another way.
_SAME = 0.005


@dataclass(frozen=True, slots=True)
class Change:
    """The changes of one model's files, each a sentence part: "Q4_K_M is there (5.0 GB)"."""

    model: Model
    lines: tuple[str, ...]


@dataclass
class Update:
    """The result of an update.

    `tables` holds the tables to write, by model: `gguf` and `mlx`, and for a new model all other
    fields. `unread` maps each repository that could not be read to the reason. The hub does not
    know the repositories in `gone`.
    """

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)


def read(models: Iterable[Model], list_files: Callable[[str], Listing]) -> Update:
    """Read the current files of `models` from the hub.

    If a repository is gone, its estimated files are dropped and its observed files kept. If access
    is denied, its files stay as they are. Raises HubUnreachableError if the hub can't be reached.
    """
    found = Update()
    known: dict[str, Listing | None] = {}
    for model in models:
        new: list[Variant] = []
        places = list(dict.fromkeys((v.format, v.repo) for v in model.variants if v.repo))
        for form, repo in places:
            if repo not in known:
                known[repo] = _listing(repo, list_files, found)
            listing = known[repo]
            if listing is not None:
                new += _published_variants(model, form, listing)
            else:
                new += _kept(model, form, repo, is_gone=repo in found.gone)
        lines = _changes(model, new)
        if lines:
            found.changes.append(Change(model, tuple(lines)))
        with_heads = {v.repo for v in model.variants if v.mtp_bytes}
        found.tables[model.id] = {form: [] for form, _ in places}
        for variant in new:
            row = _row(variant)
            if variant.repo in with_heads:
                row["heads"] = True
            found.tables[model.id][variant.format].append(row)
    return found


def add(repo: str, list_files: Callable[[str], Listing], found: Update) -> None:
    """Add a model that the catalog does not know to `found`, from a GGUF header of `repo`.

    Raises the errors of `list_files`, and DownloadError if the repository holds no GGUF file with a
    readable header.
    """
    listing = list_files(repo)
    ggufs = [s for s in variants.selections(listing) if s.format is Format.GGUF]
    if not ggufs:
        raise DownloadError(
            f"{repo} has no GGUF files", hint="give the repository with the model's GGUF files"
        )
    model = variants.model_of(listing, ggufs)
    rows = _published_variants(model, Format.GGUF, listing, known_file=ggufs[0].files[0].name)
    name = repo.rpartition("/")[2].lower().removesuffix("-gguf")
    found.tables[name] = {**table_of(model, repo), Format.GGUF: [_row(v) for v in rows]}
    sizes = [f"{v.quant} ({v.file_bytes / 1e9:.1f} GB)" for v in rows]
    found.changes.append(Change(model, (*summary(model), f"files: {', '.join(sizes)}")))


def write(update: Update, folder: Path, today: datetime.date | None = None) -> Path:
    """Write the tables atomically as a user catalog file. Models of an earlier update stay."""
    from localllm import paths

    paths.private_dir(folder)
    target = folder / UPDATE_FILE
    earlier = _earlier(target)
    tables = earlier | {n: earlier.get(n, {}) | table for n, table in update.tables.items()}
    day = (today or datetime.date.today()).isoformat()
    lines = [
        f"# Read from the hub on {day} by `localllm catalog update`.",
        "# The next update overwrites this file; delete it to restore the shipped listings.",
    ]
    for name, table in tables.items():
        lines += ["", "[[models]]", f"id = {_toml(name)}"]
        lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    paths.write_private(target, "\n".join(lines) + "\n")
    return target


def _earlier(target: Path) -> dict[str, dict[str, Any]]:
    import tomllib

    try:
        models = tomllib.loads(paths.file_text(target))["models"]
        return {m["id"]: {key: value for key, value in m.items() if key != "id"} for m in models}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        members = ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items())
        return f"{{ {members} }}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=True)


def _listing(repo: str, list_files: Callable[[str], Listing], found: Update) -> Listing | None:
    if not names.safe_repo(repo):  # a Python package
        return None
    try:
        return list_files(repo)
    except HubUnreachableError:
        raise
    except (DownloadError, ModelNotFoundError) as e:
        found.unread[repo] = e.message
        if isinstance(e, ModelNotFoundError):
            found.gone.add(repo)
        return None


def _published_variants(
    model: Model, form: Format, listing: Listing, known_file: str = ""
) -> list[Variant]:
    """This model's files in one repository. For GGUF, the first file of each quant.

    `known_file` names a file that is known to belong to the model.
    """
    found = [
        variants.listed(s, listing)
        for s in variants.selections(listing)
        if s.format == form and (is_of(model, s) or known_file in s.names)
    ]
    if form.is_folder:
        return found
    first: dict[str, Variant] = {}
    for variant in found:
        first.setdefault(variant.quant, variant)
    return list(first.values())


def _kept(model: Model, form: Format, repo: str, *, is_gone: bool) -> list[Variant]:
    """The known files of a repository that could not be read.

    Estimated files are left out if the repository `is_gone`.
    """
    old = [v for v in model.variants if v.repo == repo and v.format == form]
    return [v for v in old if not (v.is_estimate and is_gone)]


def _row(variant: Variant) -> dict[str, Any]:
    """The catalog's table of one variant. Estimated sizes are not written, because the catalog
    estimates them again."""
    row: dict[str, Any] = {"repo": variant.repo}
    size = "bytes" if variant.exact else "about"
    if variant.source == variants.HUB_SOURCE:
        row["source"] = variant.source
    if variant.is_folder:
        row["quant"] = variant.quant
        if not variant.is_estimate:
            row[size] = variant.file_bytes
        return row
    if variant.is_estimate:
        row["estimate"] = [variant.quant]
    else:
        row[size] = {variant.quant: variant.file_bytes}
    if variant.files:
        row["files"] = {variant.quant: list(variant.files)}
    if variant.mmproj_file:
        row |= {"mmproj": variant.mmproj_file, "mmproj_bytes": variant.mmproj_bytes}
    return row


def is_of(model: Model, selection: variants.Selection) -> bool:
    """True if files of this size and quant can be `model`'s.

    False for a draft head or for another model of the repository.
    """
    from localllm_catalog import quants, shapes

    size = selection.weights_bytes
    if any(v.exact and v.file_bytes == size and v.quant == selection.quant for v in model.variants):
        return True
    if not selection.format.is_folder and selection.quant in quants.MIXTURES:
        return abs(size / shapes.estimate_gguf_bytes(model, selection.quant) - 1) <= _PLAUSIBLE
    bits = 8 * size / max(1, model.params_total)
    return bool(selection.quant) and _MIN_BITS <= bits <= _MAX_BITS


def _changes(model: Model, new: Sequence[Variant]) -> list[str]:
    """The differences to show to the user."""
    old = {(v.format, v.repo, v.quant): v for v in model.variants}
    lines = []
    for now in new:
        before = old.pop((now.format, now.repo, now.quant), None)
        size = now.file_bytes
        if before is None:
            lines.append(f"new: {now.quant} ({size / 1e9:.1f} GB) in {now.repo}")
        elif before.is_estimate and not now.is_estimate:
            was = f"{before.file_bytes / 1e9:.1f} estimated"
            lines.append(f"{now.quant} is published: {size / 1e9:.1f} GB, {was}")
        elif abs(size / max(1, before.file_bytes) - 1) > _SAME:
            lines.append(f"{now.quant}: {size / 1e9:.2f} GB, was {before.file_bytes / 1e9:.2f}")
    return lines + [f"removed: {quant} in {repo}" for _, repo, quant in old]


# --- a model that the catalog does not know yet, from the header of its smallest GGUF file --------

_HEADER_NAMES = {
    "n_experts": "count",
    "n_active": "active",
    "intermediate": "ffn",
    "n_shared": "shared",
    "shared_intermediate": "shared_ffn",
    "n_dense_layers": "dense_layers",
    "latent_size": "latent",
}


def table_of(model: Model, repo: str) -> dict[str, Any]:
    """The catalog table for `model`, from its header. Unknown values are left out."""
    from localllm_catalog.build import row_of

    active = model.params_total
    experts: dict[str, Any] = {}
    if model.experts is not None:
        active = model.params_active
        experts = {_HEADER_NAMES[key]: n for key, n in asdict(model.experts).items() if n}
    purposes = list(model.purposes)
    if model.calls_tools:
        purposes.append("coding")
    reasoning = {}
    if model.reasoning_kind != "none":
        reasoning = {"kind": model.reasoning_kind}
    entry: dict[str, Any] = {
        "name": model.name,
        "family": model.family,
        "hf_repo": repo,
        "licence": model.licence,
        "params": model.params_total,
        "active": active,
        "architecture": model.architecture,
        "purposes": purposes,
    }
    entry |= {
        "layers": len(model.layers),
        "hidden": model.hidden_size,
        "ffn": model.intermediate_size,
        "heads": model.n_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab_size,
        "context": model.native_context,
        "tied": model.tied_embeddings,
        "layer_list": [
            {"times": len(list(same))} | row_of(layer) for layer, same in groupby(model.layers)
        ],
    }
    entry |= {
        "attention_gate": model.attention_gate,
        "ffn_matrices": model.ffn_matrices,
        "residual_streams": model.residual_streams if model.residual_streams > 1 else 0,
        "mtp_layers": model.mtp_layers,
        "tools": model.calls_tools,
        "tokenizer": model.tokenizer_family,
        "tokenizer_pre": model.tokenizer_pre,
        "sampling": _sampling(model),
        "experts": experts,
        "reasoning": reasoning,
    }
    if model.lookup_params:
        entry["lookup"] = _lookup(model)
    return {key: value for key, value in entry.items() if value not in ("", 0, False, {}, [])}


def _lookup(model: Model) -> dict[str, Any]:
    (variant,) = model.variants
    n_embedded = model.lookup_params + model.vocab_size * model.hidden_size
    bits = 8 * variant.input_bytes / n_embedded
    return {"params": model.lookup_params, "rows": model.lookup_rows, "bits": round(bits, 2)}


def _sampling(model: Model) -> dict[str, Any]:
    known = {
        key: value
        for key, value in asdict(model.sampling).items()
        if value is not None and key != "source"
    }
    if known:
        return {**known, "source": model.sampling.source or "the file's own header"}
    return {}


def summary(model: Model) -> list[str]:
    """A summary of a new model for the user, in sentence parts."""
    counts = Counter(sorted(layer.kind for layer in model.layers))
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    lines = [
        f"new: {model.params_total / 1e9:.1f}B parameters, layers: {kinds}; context "
        f"{model.native_context:,}"
    ]
    calls = model.calls_tools
    reasons = model.reasoning_kind != "none"
    if calls and reasons:
        lines.append("its template supports tools and thinking")
    elif calls:
        lines.append("its template supports tools, but not thinking")
    elif reasons:
        lines.append("its template supports thinking, but not tools")
    if model.shape_warning:
        lines.append(model.shape_warning)
    return lines
