"""A model that the catalog does not know yet, as a table of the user's catalog: shapes, template and sampling are read from the
header of the smallest GGUF file of its repository, of which only the beginning is fetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from localllm.errors import DownloadError, ModelFileError
from localllm.library import hub, variants
from localllm.library.catalog import read_model

if TYPE_CHECKING:
    from localllm.library.hub import Listing
    from localllm_catalog.types import Experts, Layer, Model

_HEADER_NAMES = {
    "n_experts": "count",
    "n_active": "active",
    "intermediate": "ffn",
    "n_shared": "shared",
    "shared_intermediate": "shared_ffn",
    "n_dense_layers": "dense_layers",
    "latent_size": "latent",
}


def from_hub(repo: str, list_files: Callable[[str], Listing]) -> tuple[Model, dict[str, Any], Listing]:
    """(the model, its table and the `file` it is from, its files) of a GGUF repository that no known model claims.

    Raises what `list_files` does, and DownloadError where the repository holds no GGUF file with a readable header.
    """
    listing = list_files(repo)
    there = [s for s in variants.selections(listing) if s.format == "gguf"]
    if not there:
        raise DownloadError(f"{repo} holds no GGUF files", hint="name the repository of the model's GGUF files")
    smallest = min(there, key=lambda s: s.weights_bytes).files[0]
    key = {k: v for k, v in hub.headers().items() if k == "authorization"}
    try:
        model = read_model(hub.file_url(listing, smallest.name), headers=key)
    except ModelFileError as e:
        raise DownloadError(f"{repo} does not say what model it holds: {e.message}", hint=e.hint) from e
    name = repo.rpartition("/")[2].lower().removesuffix("-gguf")
    return model, {"id": name, "file": smallest.name, **table_of(model, repo)}, listing


def table_of(model: Model, repo: str) -> dict[str, Any]:
    """What the header says of `model`, in the words of a catalog file; what it does not say is left out."""
    said: dict[str, Any] = {
        "name": model.name,
        "family": model.family,
        "hf_repo": repo,
        "licence": model.licence,
        "params": model.params_total,
        "active": model.params_active if model.experts is not None else model.params_total,
        "architecture": model.architecture,
        "purposes": list(model.purposes) + (["coding"] if model.calls_tools else []),
        "layers": len(model.layers),
        "hidden": model.hidden_size,
        "ffn": model.intermediate_size,
        "heads": model.n_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab_size,
        "context": model.native_context,
        "tied": model.tied_embeddings,
        "layer_list": [_layer(layer, len(list(same))) for layer, same in groupby(model.layers)],
        "attention_gate": model.attention_gate,
        "ffn_matrices": model.ffn_matrices,
        "residual_streams": model.residual_streams if model.residual_streams > 1 else 0,
        "mtp_layers": model.mtp_layers,
        "tools": model.calls_tools,
        "tokenizer": model.tokenizer_family,
        "tokenizer_pre": model.tokenizer_pre,
        "sampling": _sampling(model),
    }
    if model.lookup_params:
        (variant,) = model.variants
        bits = 8 * variant.input_bytes / (model.lookup_params + model.vocab_size * model.hidden_size)
        said["lookup"] = {"params": model.lookup_params, "rows": model.lookup_rows, "bits": round(bits, 2)}
    if model.experts is not None:
        said["experts"] = _experts(model.experts)
    if model.reasoning_kind != "none":
        said["reasoning"] = {"kind": model.reasoning_kind}
    return {key: value for key, value in said.items() if value not in ("", 0, False, {}, [])}


def _layer(layer: Layer, times: int) -> dict[str, Any]:
    said = {f.name: getattr(layer, f.name) for f in fields(layer)}
    defaults = {f.name: f.default for f in fields(layer)}
    return {"times": times, **{key: value for key, value in said.items() if value != defaults[key]}}


def _experts(experts: Experts) -> dict[str, int]:
    return {_HEADER_NAMES[key]: value for key, value in asdict(experts).items() if value}


def _sampling(model: Model) -> dict[str, Any]:
    known = {key: value for key, value in asdict(model.sampling).items() if value is not None and key != "source"}
    return {**known, "source": model.sampling.source or "the file's own header"} if known else {}


def summary(model: Model) -> list[str]:
    """What a person wants to know of a new model, in sentence parts."""
    kinds = ", ".join(f"{sum(1 for _ in same)} {kind}" for kind, same in groupby(sorted(x.kind for x in model.layers)))
    lines = [f"new: {model.params_total / 1e9:.1f}B parameters, layers: {kinds}; context {model.native_context:,}"]
    calls, reasons = model.calls_tools, model.reasoning_kind != "none"
    if calls or reasons:
        lines.append(
            f"its template calls {'' if calls else 'no '}tools, and {'thinks' if reasons else 'does not think'}"
        )
    if model.shape_warning:
        lines.append(model.shape_warning)
    return lines
