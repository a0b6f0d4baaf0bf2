"""Build a Model from one [[models]] table.

The short shape facts (pattern, windows, recurrent sizes) become one Layer per layer, and each file
becomes a Variant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, cast

from localllm_catalog import quants, shapes
from localllm_catalog.errors import BadCatalogError, CatalogError
from localllm_catalog.layers import mixer
from localllm_catalog.names import Format, check_file, check_repo
from localllm_catalog.types import (
    ESTIMATED,
    Companion,
    Experts,
    ImageTokens,
    Layer,
    Model,
    Purpose,
    Quality,
    SamplingDefaults,
    Variant,
)

# The keys of a [[models]] table. tests/catalog/family_schema.py describes the value of each.
_DESCRIPTION_KEYS = {
    "id", "family", "name", "hf_repo", "release_date", "licence", "architecture",
    "gguf_architecture", "modality",
    "purposes", "tokenizer", "tokenizer_pre", "tools", "reasoning", "fim", "sampling", "drafts",
    "companions", "external_drafts", "quality", "notes", "params_note", "sources", "_file",
}  # fmt: skip
_SHAPE_KEYS = {
    "params", "active", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab",
    "context", "tied", "experts", "attention_gate", "ffn_matrices", "residual_streams",
    "per_layer_embedding", "lookup", "mtp_layers", "mtp_params", "vision_params", "image_tokens",
}  # fmt: skip
_LAYER_KEYS = {
    "pattern", "layer_list", "sliding", "full", "mla", "recurrent", "shared_kv_layers",
    "shared_kv_ffn", "split_blocks",
}  # fmt: skip
MODEL_KEYS = _DESCRIPTION_KEYS.union(_SHAPE_KEYS, _LAYER_KEYS, Format)

# Sources of facts, by the labels that tables cite: title, url, date and kind (measured,
# self-reported, estimate).
Sources = Mapping[str, Mapping[str, str]]


def build_model(raw: Mapping[str, Any], sources: Sources) -> Model:
    """Build a Model with its variants from a raw table. Raises BadCatalogError with the key that is
    missing or wrong."""
    unknown = sorted(raw.keys() - MODEL_KEYS - {*mixer.words()})
    if unknown:
        closest = difflib.get_close_matches(unknown[0], MODEL_KEYS, n=1)
        if closest:
            hint = f"did you mean {closest[0]!r}?"
        else:
            hint = "see the README in model_catalog/"
        raise BadCatalogError(
            f"{raw['_file']}: {raw['id']}: {unknown[0]!r} is not a valid key for a model", hint
        )
    try:
        return _with_variants(_build(raw, sources), raw, sources)
    except KeyError as error:
        raise BadCatalogError(f"{raw['_file']}: {raw['id']} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise BadCatalogError(f"{raw['_file']}: {raw['id']}: {error}") from error
    except CatalogError as error:
        raise BadCatalogError(
            f"{raw['_file']}: {raw['id']}: {error.message}", error.hint
        ) from error


def _companion(entry: Mapping[str, Any]) -> Companion:
    companion = Companion(**entry)
    check_repo(companion.repo)
    if companion.file:
        check_file(companion.file)
    return companion


def _build(raw: Mapping[str, Any], sources: Sources) -> Model:
    """Build the model without its variants."""
    sampling = raw.get("sampling", {})
    non_thinking = sampling.get("non_thinking")
    purposes = cast("list[Purpose]", raw.get("purposes", ["chat"]))
    quality = _quality(raw.get("quality", {}), sources)
    return Model(
        **_shapes(raw),
        **_matrices(raw),
        **_parts_outside_layers(raw),
        **_abilities(raw),
        release_date=raw.get("release_date", ""),
        licence=raw.get("licence", ""),
        hf_repo=raw.get("hf_repo", ""),
        gguf_architecture=raw.get("gguf_architecture", ""),
        modality=tuple(raw.get("modality", ("text",))),
        purposes=tuple(purposes),
        sampling=_sampling(sampling),
        sampling_non_thinking=None if non_thinking is None else _sampling(non_thinking),
        quality=tuple(quality),
        notes=raw.get("notes", ""),
        params_note=raw.get("params_note", ""),
    )


def _number(table: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Return a whole number that a table may omit."""
    return int(table.get(key, default))


def _shapes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's name and its shapes."""
    n_params = int(raw["params"])
    shape_fields = {
        "params_total": n_params,
        "params_active": _number(raw, "active", n_params),
        "intermediate_size": _number(raw, "ffn"),
        "layers": build_layers(raw),
    }
    for field, key in _WHOLE_NUMBERS.items():
        shape_fields[field] = int(raw[key])
    for key in ("id", "name", "family"):
        shape_fields[key] = raw[key]
    return shape_fields


# Fields that every model states, and their keys.
_WHOLE_NUMBERS = {
    "hidden_size": "hidden",
    "n_heads": "heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab",
    "native_context": "context",
}


def _matrices(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of a model's matrices: experts, feed-forward, output."""
    return {
        "tied_embeddings": bool(raw.get("tied", False)),
        "experts": _experts(raw),
        "architecture": raw.get("architecture", "dense"),
        "ffn_matrices": _number(raw, "ffn_matrices", 3),
        "residual_streams": _number(raw, "residual_streams", 1),
        "attention_gate": bool(raw.get("attention_gate", False)),
        "q_rank": _number(raw.get("mla", {}), "q_rank"),
    }


def _parts_outside_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's tables, vision tower and draft heads."""
    lookup = raw.get("lookup", {})
    per_layer = _number(raw, "per_layer_embedding") * int(raw["layers"]) * int(raw["vocab"])
    vision = _number(raw, "vision_params")
    return {
        "lookup_params": per_layer + _number(lookup, "params"),
        "lookup_rows": _number(lookup, "rows", 1),
        "lookup_bits": float(lookup.get("bits", 0.0)),
        "extra_params": vision + _number(raw, "mtp_params"),
        "vision_params": vision,
        "image_tokens": _image_tokens(raw),
        "mtp_layers": _number(raw, "mtp_layers"),
    }


def _abilities(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's tokenizer, and what it was trained for."""
    reasoning = raw.get("reasoning", {})
    companions = tuple(_companion(entry) for entry in raw.get("companions", ()))
    return {
        "tokenizer_family": raw.get("tokenizer", ""),
        "tokenizer_pre": raw.get("tokenizer_pre", ""),
        "calls_tools": bool(raw.get("tools", False)),
        "reasoning_kind": reasoning.get("kind", "none"),
        "fim": dict(raw.get("fim", {})),
        "drafts": tuple(raw.get("drafts", ())),
        "companions": companions,
    }


def _image_tokens(raw: Mapping[str, Any]) -> ImageTokens | None:
    if "image_tokens" not in raw:
        return None
    facts = raw["image_tokens"]
    min_tokens = int(facts["least"])
    max_tokens = int(facts["most"])
    if min_tokens > max_tokens:
        raise BadCatalogError(f"an image can't have {min_tokens} to {max_tokens} tokens")
    return ImageTokens(min_tokens, max_tokens, _number(facts, "side"))


def _experts(raw: Mapping[str, Any]) -> Experts | None:
    if "experts" not in raw:
        return None
    facts = raw["experts"]
    count = int(facts["count"])
    active = int(facts["active"])
    if active > count:
        raise BadCatalogError(f"{active} of {count} experts can't be active")
    return Experts(
        n_experts=count,
        n_active=active,
        intermediate=int(facts["ffn"]),
        n_shared=_number(facts, "shared"),
        shared_intermediate=_number(facts, "shared_ffn"),
        n_dense_layers=_number(facts, "dense_layers"),
        latent_size=_number(facts, "latent"),
    )


def _sampling(facts: Mapping[str, Any]) -> SamplingDefaults:
    return SamplingDefaults(**{key: value for key, value in facts.items() if key != "non_thinking"})


def _quality(table: Mapping[str, Mapping[str, float]], sources: Sources) -> Iterator[Quality]:
    for label, scores in table.items():
        source = sources[label]
        citation = f"{source['title']} {source.get('url', '')}".strip()
        kind = source.get("kind", "")
        for benchmark, score in scores.items():
            yield Quality(benchmark, float(score), source["date"], citation, kind)


# --- variants -------------------------------------------------------------------------------------


def _with_variants(model: Model, raw: Mapping[str, Any], sources: Sources) -> Model:
    variants = [
        *_gguf_variants(model, raw.get(Format.GGUF, ()), sources),
        *_mlx_variants(model, raw.get(Format.MLX, ()), sources),
    ]
    return replace(model, variants=tuple(variants))


def names_in(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that a raw table states: id, name, repository, and those of its variants."""
    yield raw["id"]
    yield raw.get("name", "")
    yield raw.get("hf_repo", "")
    for kind in Format:
        for table in raw.get(kind, ()):
            yield table.get("repo", "")


def _source_title(table: Mapping[str, Any], sources: Sources) -> str:
    if "source" not in table:
        return ""
    return sources[table["source"]]["title"]


def _gguf_variants(
    model: Model, tables: Iterable[Mapping[str, Any]], sources: Sources
) -> Iterator[Variant]:
    # The vision tower is in its own file.
    vision_params = model.vision_params
    all_mtp_share = (model.extra_params - vision_params) / (model.params_total - vision_params)
    for table in tables:
        source = _source_title(table, sources)
        check_repo(table["repo"])
        if "mmproj" in table:
            check_file(table["mmproj"])
        mtp_share = all_mtp_share if table.get("heads") else 0.0
        for quant, size_bytes in table.get("bytes", {}).items():
            yield _gguf_variant(table, quant, int(size_bytes), True, source, mtp_share)
        for quant, size_bytes in table.get("about", {}).items():
            yield _gguf_variant(table, quant, int(size_bytes), False, source, mtp_share)
        for quant in table.get("estimate", ()):
            if quant not in quants.MIXTURES:
                raise BadCatalogError(
                    f"no bits are known for {quant}", "give its size as `bytes` or `about`"
                )
            yield _gguf_variant(
                table, quant, shapes.estimate_gguf_bytes(model, quant), False, ESTIMATED
            )


def _gguf_variant(
    table: Mapping[str, Any],
    quant: str,
    size_bytes: int,
    exact: bool,
    source: str,
    mtp_share: float = 0.0,
) -> Variant:
    mtp_bytes = round(mtp_share * size_bytes)
    return Variant(
        Format.GGUF,
        quant,
        table["repo"],
        _file_names(table, quant),
        size_bytes,
        exact,
        mmproj_file=table.get("mmproj", ""),
        mmproj_bytes=_number(table, "mmproj_bytes"),
        source=source,
        weights_bytes=size_bytes - mtp_bytes if mtp_bytes else 0,
        mtp_bytes=mtp_bytes,
    )


def _file_names(table: Mapping[str, Any], quant: str) -> tuple[str, ...]:
    file_names = table.get("files", {}).get(quant)
    if file_names is not None:
        return tuple(check_file(name) for name in file_names)
    if "file" not in table:
        return ()
    return (check_file(table["file"].replace("{quant}", quant)),)


def _mlx_variants(
    model: Model, tables: Iterable[Mapping[str, Any]], sources: Sources
) -> Iterator[Variant]:
    for table in tables:
        repo = check_repo(table["repo"])
        quant = table["quant"]
        source = _source_title(table, sources)
        size_bytes = table.get("bytes", table.get("about"))
        if size_bytes is None:
            size_bytes = shapes.estimate_mlx_bytes(model, quant)
            source = ESTIMATED
        yield Variant(Format.MLX, quant, repo, (), int(size_bytes), "bytes" in table, source=source)


# --- layers ---------------------------------------------------------------------------------------

_TOKEN = re.compile(r"([a-z_]+)(?:\*([1-9][0-9]{0,3}))?")


def expand_pattern(pattern: list[str], n_layers: int) -> list[str]:
    """Expand ["sliding*5", "full"] for 8 layers: sliding ×5, full, sliding ×2. A pattern of the
    model's length is used as it is.

    Raises BadCatalogError for an unknown word or a pattern longer than the model.
    """
    known_words = mixer.words()
    words: list[str] = []
    for token in pattern:
        match = _TOKEN.fullmatch(token)
        if match is None or match[1] not in known_words:
            words_text = ", ".join(f'"{word}"' for word in known_words)
            raise BadCatalogError(
                f"{token!r} is not a layer pattern", f'write {words_text}, with "*N" to repeat'
            )
        words += [match[1]] * int(match[2] or 1)
    if not words or len(words) > n_layers:
        raise BadCatalogError(f"the pattern names {len(words)} layers, the model has {n_layers}")
    return [words[i % len(words)] for i in range(n_layers)]


def build_layers(raw: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Build the layers of one [[models]] table. Raises BadCatalogError, or KeyError with the
    missing key."""
    n_layers = int(raw["layers"])
    if "layer_list" in raw:
        return _listed_layers(raw["layer_list"], n_layers)
    experts = raw.get("experts")
    shared_from = n_layers - int(raw.get("shared_kv_layers", 0))
    dense_until = int(experts.get("dense_layers", 0)) if experts else n_layers
    layers_by_kind: dict[tuple[str, bool, bool], Layer] = {}
    layers = []
    for index, word in enumerate(expand_pattern(raw.get("pattern", ["full"]), n_layers)):
        key = (word, index >= shared_from, index < dense_until)
        if key not in layers_by_kind:
            layers_by_kind[key] = _layer(raw, *key)
        layers.append(layers_by_kind[key])
    return tuple(layers)


def _listed_layers(rows: list[dict[str, Any]], n_layers: int) -> tuple[Layer, ...]:
    """Build layers that are listed one by one or in repeated groups, as read from a file's
    header."""
    layers = tuple(islice(_repeated_layers(rows, n_layers + 1), n_layers + 1))
    if len(layers) != n_layers:
        raise BadCatalogError(f"the layers listed are not the {n_layers} that the model has")
    return layers


def _repeated_layers(rows: list[dict[str, Any]], max_times: int) -> Iterator[Layer]:
    for row in rows:
        if "layers" in row:
            group = list(islice(_repeated_layers(row["layers"], max_times), max_times))
        else:
            group = [layer_of({key: value for key, value in row.items() if key != "times"})]
        for _ in range(row["times"] if group else 0):
            yield from group


_FFN_KEYS = ("ffn", "intermediate")


def layer_of(row: Mapping[str, Any]) -> Layer:
    """Return the layer in a row of `layer_list`, without `times`."""
    ffn = {key: row[key] for key in _FFN_KEYS if key in row}
    rest = {key: value for key, value in row.items() if key not in _FFN_KEYS}
    return Layer(mixer.from_row(rest), **ffn)


def row_of(layer: Layer) -> dict[str, Any]:
    """Return the row of `layer_list` for `layer`."""
    row = layer.mixer.to_row()
    if layer.ffn != "dense":
        row["ffn"] = layer.ffn
    if layer.intermediate:
        row["intermediate"] = layer.intermediate
    return row


def _layer(raw: Mapping[str, Any], word: str, shares_kv: bool, dense: bool) -> Layer:
    token_mixer = mixer.from_table(mixer.TableLayer(raw, word, shares_kv))
    width = int(raw.get("shared_kv_ffn", 0)) if shares_kv else 0
    if raw.get("split_blocks") and word != "none":
        return Layer(token_mixer, "none", width)
    if dense:
        return Layer(token_mixer, "dense", width)
    if raw["experts"].get("beside_dense"):
        return Layer(token_mixer, "both", width)
    return Layer(token_mixer, "experts", width)
