"""Format the output of `localllm models`: rows, and the details of one model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localllm.cli.commands.shared import table
from localllm.formatting import byte_size
from localllm.plain_output import plain

if TYPE_CHECKING:
    from localllm.library.types import LocalModel
    from localllm_catalog.types import Model, Variant


def as_row(model: LocalModel) -> dict[str, Any]:
    """Return an installed model as --json prints it."""
    files = {
        "files": [str(file) for file in model.files],
        "mmproj": None if model.mmproj is None else str(model.mmproj),
        "mmproj_fault": model.mmproj_fault,
        "companions": [{"kind": kind, "path": str(file)} for kind, file in model.companions],
    }
    return {
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "bytes": model.size_bytes,
        "quant": model.quant,
        "origin": model.origin,
        "repo": model.repo,
        "fault": model.fault,
        **files,
    }


def listing(installed: list[LocalModel]) -> list[str]:
    """Format a row for each model, and other files found next to them. Empty if there are no
    models."""
    if not installed:
        return []
    rows = [("NAME", "QUANT", "SIZE", "FORMAT", "FROM")]
    for model in sorted(installed, key=_by_name_and_size):
        rows.append(
            (
                model.name,
                model.quant or "?",
                byte_size(model.size_bytes),
                model.format,
                model.origin,
            )
        )
    lines = [table(rows, right_aligned=(2,))]
    attached = {model.mmproj for model in installed}
    unattached = {
        file: kind for model in installed for kind, file in model.companions if file not in attached
    }
    if unattached:
        lines += ["", "Companion files (not models):"]
    for file, kind in unattached.items():
        lines.append(f"{plain(file.name)}: {_kind_text(kind)}")
    return lines


def _by_name_and_size(model: LocalModel) -> tuple[str, int]:
    return model.name.lower(), model.size_bytes


def _kind_text(kind: str) -> str:
    from localllm_catalog.kinds import WORDS

    for known_kind, (description, _) in WORDS.items():
        if known_kind == kind:
            return description
    return kind


def facts(model: Model | None) -> dict[str, Any] | None:
    """Return the known properties of a model as --json prints them."""
    if model is None:
        return None
    from localllm_catalog import shapes

    identity = {"id": model.id, "name": model.name, "architecture": model.architecture}
    return {
        **identity,
        "params_total": model.params_total,
        "params_active": model.params_active,
        "layers": len(model.layers),
        "native_context": model.native_context,
        "kv_bytes_per_token_f16": shapes.kv_bytes_per_token(model),
        "licence": model.licence,
        "release_date": model.release_date,
        "modality": list(model.modality),
        "image_tokens": asdict(model.image_tokens) if model.image_tokens else None,
        "variants": [_variant(variant) for variant in model.variants],
    }


def _variant(variant: Variant) -> dict[str, Any]:
    return {
        "format": variant.format,
        "quant": variant.quant,
        "repo": variant.repo,
        "files": list(variant.files),
        "bytes": variant.file_bytes,
        "exact": variant.exact,
        "mmproj": variant.mmproj_file or None,
        "mmproj_bytes": variant.mmproj_bytes or None,
    }


def info_lines(model: Model | None, local: LocalModel | None) -> list[str]:
    """Format a model's properties and files for display."""
    facts: list[tuple[str, str]] = []
    if local is not None:
        facts += _file_facts(local)
    if model is not None:
        facts += _model_facts(model)
    width = max(len(key) for key, _ in facts)
    lines = [f"{key:<{width}}  {plain(value)}" for key, value in facts]
    if local is None and model is not None:
        lines += ["", _variants_table(model), ""]
        lines.append(f"not on this disk; download it: localllm pull {model.id}")
    return lines


def _file_facts(local: LocalModel) -> list[tuple[str, str]]:
    size_text = byte_size(local.size_bytes)
    n_files = len(local.files)
    origin: str = local.origin
    if local.repo:
        origin += f", {local.repo}"
    facts = [
        ("name", local.name),
        ("path", str(local.path)),
        ("size", f"{size_text} ({local.size_bytes:,} bytes in {n_files} file(s))"),
        ("quant", f"{local.quant or 'unknown'} ({local.format})"),
        ("from", origin),
    ]
    if local.fault:
        facts.append(("", f"not usable: {local.fault}"))
    if local.mmproj is not None:
        facts.append(("projector", str(local.mmproj)))
    if local.mmproj_fault:
        facts.append(("", f"not usable: {local.mmproj_fault}"))
    for kind, file in local.companions:
        facts.append(("companion", f"{file.name}: {_kind_text(kind)}"))
    return facts


def _variants_table(model: Model) -> str:
    rows = [("QUANT", "FORMAT", "SIZE", "REPOSITORY")]
    for variant in model.variants:
        size_text = byte_size(variant.file_bytes)
        if not variant.exact:
            size_text = f"~{size_text}"
        rows.append((variant.quant, variant.format, size_text, variant.repo))
    return table(rows, right_aligned=(2,))


def _model_facts(model: Model) -> list[tuple[str, str]]:
    from localllm.load.candidates import image_facts
    from localllm_catalog import shapes

    parameters = f"{model.params_total / 1e9:.2f} B parameters"
    if model.params_active != model.params_total:
        parameters += f", {model.params_active / 1e9:.2f} B active per token"
    kv_bytes = shapes.kv_bytes_per_token(model)
    facts = [
        ("model", f"{model.name} ({model.architecture})"),
        ("parameters", parameters),
        ("context", f"{model.native_context:,} tokens; {kv_bytes:,} bytes of KV each at f16"),
    ]
    images = image_facts(model)
    if images:
        facts.append(("images", images))
    if model.licence:
        facts.append(("licence", model.licence))
    return facts
