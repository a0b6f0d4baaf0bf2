"""Loads the curated models: families/*.toml, with the user's own files laid over them."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from localllm_catalog import parsed, quants, shapes
from localllm_catalog.errors import BadCatalogError, CatalogError
from localllm_catalog.layout import build_layers
from localllm_catalog.names import check_file, check_repo
from localllm_catalog.types import ESTIMATED, Experts, ImageTokens, Model, Purpose, Quality, SamplingDefaults, Variant

_HERE = Path(__file__).parent
FAMILIES_DIR = _HERE / "families"
SOURCES_FILE = _HERE / "sources.toml"

# The keys of a [[models]] table; schema.ModelTable says what each holds (and a test that the two agree).
MODEL_KEYS = frozenset({
    "id", "family", "name", "hf_repo", "release_date", "licence", "params", "active", "architecture",
    "modality", "purposes", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "context",
    "tied", "pattern", "layer_list", "sliding", "full", "shared_kv_layers", "shared_kv_ffn", "per_layer_embedding", "lookup", "mla",
    "recurrent", "experts", "attention_gate", "ffn_matrices", "residual_streams", "split_blocks", "mtp_layers", "vision_params",
    "image_tokens",
    "mtp_params", "params_note", "tokenizer", "tokenizer_pre", "tools", "reasoning", "fim", "sampling",
    "drafts", "external_drafts", "quality", "notes", "sources", "gguf", "mlx", "_file",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class FactSource:
    """Where a fact comes from: `kind` measured / self-reported / estimate, the date it was published or copied."""

    label: str
    title: str
    url: str
    date: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Catalog:
    """All known models, in file order, the user's own included. Immutable."""

    models: tuple[Model, ...]
    by_id: Mapping[str, Model] = field(repr=False)

    def get(self, model_id: str) -> Model | None:
        """The model of this id, or None. Case does not matter, and "-instruct" or "-it" at the end may be left off."""
        wanted = model_id.lower()
        names = (wanted, f"{wanted}-instruct", f"{wanted}-it")
        return next((self.by_id[name] for name in names if name in self.by_id), None)

    def recognise(self, *names: str) -> Model | None:
        """The model one of these belongs to: a repository, a file name, a `general.name`. None unless it is certain.

        Publishers' prefixes, quants, split numbers and endings are looked past; sizes and versions are not.
        """
        known: dict[str, Model] = {}
        for model in self.models:
            repos = (model.hf_repo, *(variant.repo for variant in model.variants))
            for name in (model.id, model.name, *repos):
                known.setdefault(_bare(name), model)
        return next((known[bare] for name in names if (bare := _bare(name)) and bare in known), None)

    def suggest(self, name: str, limit: int = 3) -> list[str]:
        """Ids a person who typed `name` may have meant, best first; empty if nothing is near."""
        wanted = name.lower().rpartition("/")[2]
        inside = sorted((i for i in self.by_id if wanted and (wanted in i or i in wanted)), key=len)
        near = difflib.get_close_matches(wanted, self.by_id, n=limit, cutoff=0.55)
        return list(dict.fromkeys(inside + near))[:limit]


# What published names carry beside the model's own: "Qwen_Qwen3-8B-UD-Q4_K_XL-00001-of-00002.gguf", "…-4bit", "…-GGUF".
_TRIMMINGS = re.compile(
    r"\.gguf$|-[0-9]{5}-of-[0-9]{5}$|[-.](?:UD-)?(?:I?Q[1-8]_[A-Z0-9_]+|MXFP4(?:_MOE|-Q8)?|NVFP4|BF16|F16|F32)$"
    r"|-(?:MLX|GGUF)$|-[3-8]bit$",
    re.IGNORECASE,
)


def _bare(name: str) -> str:
    text = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    while (shorter := _TRIMMINGS.sub("", text)) != text:
        text = shorter
    publisher, _, rest = text.partition("_")
    if rest and "-" not in publisher:
        text = rest
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def load(user_dir: Path | None = None, cache: Path | None = None) -> Catalog:
    """The catalog with `user_dir`/*.toml laid over it: a known id changes that model's keys, a new id adds a model.

    `cache`: a file to keep the parsed shipped tables in. Raises BadCatalogError naming file, model and key for anything
    that does not read.
    """
    families = sorted(FAMILIES_DIR.glob("*.toml"))
    documents = parsed.read_all([SOURCES_FILE, *families], _parse, cache)
    sources = _sources(documents[SOURCES_FILE.name])
    raw: dict[str, dict[str, Any]] = {}
    for path in families:
        for table in _models_of(documents[path.name], path):
            if table["id"] in raw:
                raise BadCatalogError(f"{path.name}: {table['id']} is already in {raw[table['id']]['_file']}")
            raw[table["id"]] = table
    for path in _files_in(user_dir) if user_dir is not None else ():
        for table in read_family(path):
            _check_values(table, f"{path.name}: {table['id']}")
            raw[table["id"]] = _overlay(raw.get(table["id"]), table)
    models = tuple(build_model(table, sources) for table in raw.values())
    return Catalog(models, {model.id: model for model in models})


def _files_in(folder: Path) -> list[Path]:
    """The *.toml files of the user's folder; none where there is no such folder."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".toml")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadCatalogError(f"{folder} cannot be read: {error.strerror}", "check its permissions") from error


# What a user's file may say: text where text is meant, and in numbers nothing negative, of these at least one, and no
# more than real models have (a header is held to the same: from_gguf.py).
_TEXT = frozenset({
    "name", "hf_repo", "licence", "release_date", "architecture", "tokenizer", "tokenizer_pre", "notes", "params_note", "kind", "format",
    "control", "repo", "quant", "file", "mmproj", "source",
})  # fmt: skip
_AT_LEAST_ONE = frozenset({"params", "active", "layers", "hidden", "heads", "head_dim", "vocab", "context", "count"})
_MOST_LAYERS = 2_048
_MOST = 1 << 50


def _check_values(table: Mapping[str, Any], where: str) -> None:
    for key, value in table.items():
        if key in _TEXT and not isinstance(value, str):
            raise BadCatalogError(f"{where}: {key} is {value!r}, not text")
        if isinstance(value, int | float) and not isinstance(value, bool):
            least, most = int(key in _AT_LEAST_ONE), _MOST_LAYERS if key == "layers" else _MOST
            if not least <= value <= most:
                raise BadCatalogError(f"{where}: {key} is {value}, not a number from {least} to {most:,}")
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, Mapping):
                _check_values(part, f"{where}: {key}")


def _sources(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, FactSource]:
    return {
        label: FactSource(label, fact["title"], fact.get("url", ""), fact["date"], fact.get("kind", ""))
        for label, fact in facts.items()
    }


def read_sources(path: Path = SOURCES_FILE) -> dict[str, dict[str, Any]]:
    """sources.toml as it is written."""
    return _parse(path)


def read_family(path: Path) -> Iterator[dict[str, Any]]:
    """The raw model tables of one family file, each with the file's [defaults] under it."""
    yield from _models_of(_parse(path), path)


def _models_of(document: Mapping[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    family = document.get("family", path.stem)
    defaults = document.get("defaults", {})
    tables = document.get("models")
    if not isinstance(tables, list) or not tables or not isinstance(defaults, dict):
        raise BadCatalogError(f"{path.name} has no [[models]]", "see the README in model_catalog/")
    for table in tables:
        if not isinstance(table, dict) or not isinstance(table.get("id"), str):
            raise BadCatalogError(f"{path.name}: a [[models]] table has no id")
        yield {"family": family, **defaults, **table, "id": table["id"].lower(), "_file": path.name}


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadCatalogError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise BadCatalogError(f"{path} is not a catalog file: its values are nested without end") from None
    except OSError as error:
        raise BadCatalogError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error


def _overlay(base: dict[str, Any] | None, table: dict[str, Any]) -> dict[str, Any]:
    """`table` over `base`; sub-tables (sampling, experts, …) are merged key by key, lists are replaced."""
    if base is None:
        return table
    merged = dict(base)
    for key, value in table.items():
        old = merged.get(key)
        if key != "family":
            merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def build_model(raw: Mapping[str, Any], sources: Mapping[str, FactSource]) -> Model:
    """One raw table as a Model with its variants. Raises BadCatalogError naming what is missing or wrong."""
    unknown = sorted(raw.keys() - MODEL_KEYS)
    if unknown:
        near = difflib.get_close_matches(unknown[0], MODEL_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see the README in model_catalog/"
        raise BadCatalogError(f"{raw['_file']}: {raw['id']}: {unknown[0]!r} is not a key of a model", hint)
    try:
        return _with_variants(_build(raw, sources), raw, sources)
    except KeyError as error:
        raise BadCatalogError(f"{raw['_file']}: {raw['id']} does not say {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise BadCatalogError(f"{raw['_file']}: {raw['id']}: {error}") from error
    except CatalogError as error:
        raise BadCatalogError(f"{raw['_file']}: {raw['id']}: {error.message}", error.hint) from error


def _build(raw: Mapping[str, Any], sources: Mapping[str, FactSource]) -> Model:
    tools = raw.get("tools", {})
    reasoning = raw.get("reasoning", {})
    tags = reasoning.get("tags")
    total = int(raw["params"])
    sampling = raw.get("sampling", {})
    return Model(
        id=raw["id"],
        name=raw["name"],
        family=raw["family"],
        params_total=total,
        params_active=int(raw.get("active", total)),
        layers=build_layers(raw),
        hidden_size=int(raw["hidden"]),
        intermediate_size=int(raw.get("ffn", 0)),
        n_heads=int(raw["heads"]),
        head_dim=int(raw["head_dim"]),
        vocab_size=int(raw["vocab"]),
        native_context=int(raw["context"]),
        tied_embeddings=bool(raw.get("tied", False)),
        experts=_experts(raw["experts"]) if "experts" in raw else None,
        architecture=raw.get("architecture", "dense"),
        release_date=raw.get("release_date", ""),
        licence=raw.get("licence", ""),
        modality=tuple(raw.get("modality", ("text",))),
        purposes=tuple(cast("list[Purpose]", raw.get("purposes", ["chat"]))),
        tokenizer_family=raw.get("tokenizer", ""),
        tokenizer_pre=raw.get("tokenizer_pre", ""),
        tool_format=tools.get("format"),
        tool_markers=tuple(tools.get("markers", ())),
        reasoning_tags=(tags[0], tags[1]) if tags else None,
        reasoning_kind=reasoning.get("kind", "none"),
        reasoning_control=reasoning.get("control", ""),
        fim=dict(raw.get("fim", {})),
        sampling=_sampling(sampling),
        sampling_non_thinking=_sampling(sampling["non_thinking"]) if "non_thinking" in sampling else None,
        mtp_layers=int(raw.get("mtp_layers", 0)),
        drafts=tuple(raw.get("drafts", ())),
        external_drafts=tuple(raw.get("external_drafts", ())),
        quality=tuple(_quality(raw.get("quality", {}), sources)),
        hf_repo=raw.get("hf_repo", ""),
        notes=raw.get("notes", ""),
        sources=tuple(raw.get("sources", ())),
        extra_params=int(raw.get("vision_params", 0)) + int(raw.get("mtp_params", 0)),
        vision_params=int(raw.get("vision_params", 0)),
        image_tokens=_image_tokens(raw["image_tokens"]) if "image_tokens" in raw else None,
        lookup_params=int(raw.get("per_layer_embedding", 0)) * int(raw["layers"]) * int(raw["vocab"])
        + int(raw.get("lookup", {}).get("params", 0)),
        lookup_rows=int(raw.get("lookup", {}).get("rows", 1)),
        lookup_bits=float(raw.get("lookup", {}).get("bits", 0.0)),
        ffn_matrices=int(raw.get("ffn_matrices", 3)),
        residual_streams=int(raw.get("residual_streams", 1)),
        attention_gate=bool(raw.get("attention_gate", False)),
        q_rank=int(raw.get("mla", {}).get("q_rank", 0)),
        params_note=raw.get("params_note", ""),
    )


def _image_tokens(facts: Mapping[str, Any]) -> ImageTokens:
    if int(facts["least"]) > int(facts["most"]):
        raise BadCatalogError(f"an image can't be from {facts['least']} to {facts['most']} tokens")
    return ImageTokens(int(facts["least"]), int(facts["most"]), int(facts.get("side", 0)))


def _experts(facts: Mapping[str, Any]) -> Experts:
    if int(facts["active"]) > int(facts["count"]):
        raise BadCatalogError(f"{facts['active']} of {facts['count']} experts can't be active")
    return Experts(
        n_experts=int(facts["count"]),
        n_active=int(facts["active"]),
        intermediate=int(facts["ffn"]),
        n_shared=int(facts.get("shared", 0)),
        shared_intermediate=int(facts.get("shared_ffn", 0)),
        n_dense_layers=int(facts.get("dense_layers", 0)),
        latent_size=int(facts.get("latent", 0)),
    )


def _sampling(facts: Mapping[str, Any]) -> SamplingDefaults:
    known = {key: value for key, value in facts.items() if key != "non_thinking"}
    return SamplingDefaults(**known)


def _quality(table: Mapping[str, Mapping[str, float]], sources: Mapping[str, FactSource]) -> Iterator[Quality]:
    for label, scores in table.items():
        source = sources[label]
        for benchmark, score in scores.items():
            where = f"{source.title} {source.url}".strip()
            yield Quality(benchmark, float(score), source.date, where, source.kind)


# --- variants -------------------------------------------------------------------------------------------------------


def _with_variants(model: Model, raw: Mapping[str, Any], sources: Mapping[str, FactSource]) -> Model:
    variants = [
        *_gguf_variants(model, raw.get("gguf", ()), sources),
        *_mlx_variants(model, raw.get("mlx", ()), sources),
    ]
    return replace(model, variants=tuple(variants))


def _gguf_variants(
    model: Model, tables: Iterable[Mapping[str, Any]], sources: Mapping[str, FactSource]
) -> Iterator[Variant]:
    for table in tables:
        source = sources[table["source"]].title if "source" in table else ""
        for quant, size in table.get("bytes", {}).items():
            yield _gguf(table, quant, int(size), True, source)
        for quant, size in table.get("about", {}).items():
            yield _gguf(table, quant, int(size), False, source)
        for quant in table.get("estimate", ()):
            if quant not in quants.MIXTURES:
                raise BadCatalogError(f"no bits are known for {quant}", "give its size under bytes or about")
            yield _gguf(table, quant, shapes.estimate_gguf_bytes(model, quant), False, ESTIMATED)


def _gguf(table: Mapping[str, Any], quant: str, size: int, exact: bool, source: str) -> Variant:
    names = table.get("files", {}).get(quant)
    if names is None:
        names = [table["file"].replace("{quant}", quant)] if "file" in table else []
    return Variant(
        "gguf",
        quant,
        check_repo(table["repo"]),
        tuple(check_file(name) for name in names),
        size,
        exact,
        mmproj_file=check_file(table["mmproj"]) if "mmproj" in table else "",
        mmproj_bytes=int(table.get("mmproj_bytes", 0)),
        source=source,
    )


def _mlx_variants(
    model: Model, tables: Iterable[Mapping[str, Any]], sources: Mapping[str, FactSource]
) -> Iterator[Variant]:
    for table in tables:
        repo, quant = check_repo(table["repo"]), table["quant"]
        size = table.get("bytes", table.get("about"))
        if size is None:
            size, source = shapes.estimate_mlx_bytes(model, quant), ESTIMATED
        else:
            source = sources[table["source"]].title if "source" in table else ""
        yield Variant("mlx", quant, repo, (), int(size), "bytes" in table, source=source)
