"""How `localllm models` shows models: rows, and what is known of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localllm.cli.commands.shared import table
from localllm.formatting import byte_size
from localllm.plain_output import plain

if TYPE_CHECKING:
    from localllm.library.types import LocalModel
    from localllm_catalog.types import Model


def as_row(model: LocalModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "bytes": model.size_bytes,
        "quant": model.quant,
        "origin": model.origin,
        "repo": model.repo,
        "files": [str(f) for f in model.files],
        "mmproj": str(model.mmproj) if model.mmproj is not None else None,
        "companions": [{"kind": kind, "path": str(file)} for kind, file in model.companions],
    }


def listing(found: list[LocalModel]) -> list[str]:
    """A row for each model, and what lies beside them; nothing where there is none."""
    if not found:
        return []
    head = ("NAME", "QUANT", "SIZE", "FORMAT", "FROM")
    ordered = sorted(found, key=lambda m: (m.name.lower(), m.size_bytes))
    rows = [(m.name, m.quant or "?", byte_size(m.size_bytes), m.format, m.origin) for m in ordered]
    attached = {m.mmproj for m in found}
    beside = {file: kind for m in found for kind, file in m.companions if file not in attached}
    lines = [f"{plain(file.name)}: {_what(kind)}" for file, kind in beside.items()]
    title = ["", "Beside them, and no models:"] if lines else []
    return [table([head, *rows], right=(2,)), *title, *lines]


def _what(kind: str) -> str:
    from localllm_catalog.kinds import WORDS

    return next((words for name, (words, _) in WORDS.items() if name == kind), kind)


def facts(model: Model | None) -> dict[str, Any] | None:
    """What the catalog or a header says of a model, as --json prints it."""
    if model is None:
        return None
    from localllm_catalog import shapes

    return {
        "id": model.id,
        "name": model.name,
        "architecture": model.architecture,
        "params_total": model.params_total,
        "params_active": model.params_active,
        "layers": len(model.layers),
        "native_context": model.native_context,
        "kv_bytes_per_token_f16": shapes.kv_bytes_per_token(model),
        "licence": model.licence,
        "release_date": model.release_date,
        "modality": list(model.modality),
        "image_tokens": asdict(model.image_tokens) if model.image_tokens else None,
        "variants": [
            {
                "format": v.format,
                "quant": v.quant,
                "repo": v.repo,
                "files": list(v.files),
                "bytes": v.file_bytes,
                "exact": v.exact,
                "mmproj": v.mmproj_file or None,
                "mmproj_bytes": v.mmproj_bytes or None,
            }
            for v in model.variants
        ],
    }


def info_lines(model: Model | None, local: LocalModel | None) -> list[str]:
    """The same for people, with where its files are."""
    said: list[tuple[str, str]] = []
    if local is not None:
        said += [
            ("name", local.name),
            ("path", str(local.path)),
            (
                "size",
                f"{byte_size(local.size_bytes)} ({local.size_bytes:,} bytes in "
                f"{len(local.files)} "
                "file(s))",
            ),
            ("quant", f"{local.quant or 'not said'} ({local.format})"),
            ("from", local.origin + (f", {local.repo}" if local.repo else "")),
        ]
        if local.mmproj is not None:
            said.append(("projector", str(local.mmproj)))
        said += [("beside it", f"{file.name}: {_what(kind)}") for kind, file in local.companions]
    if model is not None:
        said += _model_facts(model)
    width = max(len(key) for key, _ in said)
    lines = [f"{key:<{width}}  {plain(value)}" for key, value in said]
    if local is None and model is not None:
        head = ("QUANT", "FORMAT", "SIZE", "REPOSITORY")
        rows = [
            (v.quant, v.format, ("" if v.exact else "~") + byte_size(v.file_bytes), v.repo)
            for v in model.variants
        ]
        lines += [
            "",
            table([head, *rows], right=(2,)),
            "",
            f"not on this disk; fetch it: localllm pull {model.id}",
        ]
    return lines


def _model_facts(model: Model) -> list[tuple[str, str]]:
    from localllm.load.candidates import image_facts
    from localllm_catalog import shapes

    per_token = f", {model.params_active / 1e9:.2f} B active per token"
    kv_bytes = shapes.kv_bytes_per_token(model)
    facts = (
        ("model", f"{model.name} ({model.architecture})"),
        (
            "parameters",
            f"{model.params_total / 1e9:.2f} B parameters"
            f"{per_token if model.params_active != model.params_total else ''}",
        ),
        ("context", f"{model.native_context:,} tokens; {kv_bytes:,} bytes of KV each at f16"),
        ("images", image_facts(model)),
        ("licence", model.licence),
    )
    return [(name, value) for name, value in facts if value]
