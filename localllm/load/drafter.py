"""What drafts for a model that is loaded: lookups, its own heads, a second model, or a drafter trained for it (EAGLE-3, DFlash)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import UnsupportedError

if TYPE_CHECKING:
    from localllm.library.resolve import LocalModel
    from localllm.planner.types import CompanionDrafter
    from localllm.settings import Settings
    from localllm_catalog.gguf import GgufHeader

_KINDS = ("eagle3", "dflash", "gemma4-assistant")


@dataclass(frozen=True)
class ChosenDrafter:
    """The engine's drafting `mode`, the `second` model that drafts, or the `companion`: asked for by name, or (`found`) lying
    beside the model or in its own file ("mtp"), so that it may be left out."""

    mode: str = "auto"
    second: LocalModel | None = None
    companion: CompanionDrafter | None = None
    found: bool = False


def chosen_drafter(local: LocalModel, settings: Settings) -> ChosenDrafter:
    """What the `draft` setting comes to for `local`. Raises UnsupportedError for heads that the model does not have and a
    drafter of another model's, and as `library.resolve` for a second model."""
    from localllm.engine.messages import DRAFT_MODES
    from localllm.library.resolve import resolve

    draft = settings.value("draft")
    if draft == "mtp":
        _check_draft_heads(local)
    if draft == "auto":
        return _at_hand(local)
    if draft in DRAFT_MODES:
        return ChosenDrafter(draft)
    if (named := companion_at(Path(draft))) is not None:
        why = why_unfit(named, local)
        if why is not None:
            hint = "use the drafter published for this very model, or --draft auto"
            raise UnsupportedError(f"--draft {Path(draft).name}: {why}", hint=hint)
        return ChosenDrafter(companion=named)
    return ChosenDrafter(second=resolve(draft, offline=bool(settings.value("offline"))))


def companion_at(path: Path) -> CompanionDrafter | None:
    """The trained drafter in this file; None for any other file, and none."""
    from localllm.library.catalog import readable_header
    from localllm.planner.types import CompanionDrafter

    header = readable_header(path) if path.suffix == ".gguf" and path.is_file() else None
    if header is None or header.architecture not in _KINDS:
        return None
    arch = header.architecture
    heads = header.integer(f"{arch}.attention.head_count_kv") or header.integer(f"{arch}.attention.head_count")
    width = header.integer(f"{arch}.embedding_length")
    each = header.integer(f"{arch}.attention.key_length") or width // max(
        1, header.integer(f"{arch}.attention.head_count")
    )
    return CompanionDrafter(
        kind=arch,
        path=str(path),
        file_bytes=path.stat().st_size,
        # An assistant reads the model's own.
        kv_elements=0 if arch == _KINDS[2] else 2 * heads * each * max(1, header.integer(f"{arch}.block_count")),
        width=header.integer("eagle3.target_hidden_size") or header.integer(f"{arch}.embedding_length_out") or width,
        block=header.integer(f"{arch}.block_size"),
    )


def why_unfit(companion: CompanionDrafter, local: LocalModel) -> str | None:
    """Why that drafter can't be this model's, as far as headers say; None where nothing speaks against it."""
    from localllm.library.catalog import readable_header

    if local.format != "gguf":
        return "trained drafters run on llama.cpp only, beside a GGUF file"
    header = readable_header(local.path)
    return _other_width(companion, header, local.name) if header is not None else None


def _other_width(companion: CompanionDrafter, header: GgufHeader, name: str) -> str | None:
    width = header.integer(f"{header.architecture}.embedding_length")
    if width == companion.width:
        return None
    return f"it was trained for a model whose layers are {companion.width:,} wide, and those of {name} are {width:,}"


def _at_hand(local: LocalModel) -> ChosenDrafter:
    """The smallest trained drafter beside `local`, or fetched for it, that fits, else its own heads, where they take nothing
    else away: memory of windows and states is kept in pieces only without."""
    from localllm.library.catalog import readable_header
    from localllm.library.pull import drafters_here

    header = readable_header(local.path) if local.format == "gguf" else None
    if header is None or any(
        f"{header.architecture}.{key}" in header.metadata
        for key in ("attention.sliding_window", "ssm.state_size", "full_attention_interval", "shortconv.l_cache")
    ):
        return ChosenDrafter()
    files = [path for kind, path in local.companions if kind == "drafter"]
    files += drafters_here((local.repo, local.name)) if not files else []
    found = [companion for path in files if (companion := companion_at(path)) is not None]
    fitting = [companion for companion in found if _other_width(companion, header, local.name) is None]
    if fitting:
        return ChosenDrafter(companion=min(fitting, key=lambda companion: companion.file_bytes), found=True)
    heads = header.metadata.get(f"{header.architecture}.nextn_predict_layers")
    return ChosenDrafter("mtp", found=True) if heads else ChosenDrafter()


def _check_draft_heads(local: LocalModel) -> None:
    from localllm.library.catalog import readable_header

    hint = "use --draft auto, which drafts from the text itself, or a model whose file carries draft heads"
    # Which weights an MLX folder has is seen when it is loaded.
    header = readable_header(local.path) if local.format == "gguf" else None
    if header is not None and not header.metadata.get(f"{header.architecture}.nextn_predict_layers"):
        why = f"{local.name} has no draft heads: its header names none (nextn_predict_layers)"
        raise UnsupportedError(f"--draft mtp: {why}", hint=hint)
