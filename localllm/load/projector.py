"""Images: whether a model is loaded with the projector that lies beside it, and what the catalog says of reading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import DoesNotFitError, LocalLLMError, UnsupportedError

if TYPE_CHECKING:
    from localllm.library.resolve import LocalModel
    from localllm.settings import Settings
    from localllm_backends.contract import BackendType
    from localllm_catalog.types import Model


@dataclass(frozen=True)
class ImageProjector:
    """The projector's file to load (None: none), what it takes in bytes, and why there is none ("": the model has none)."""

    file: Path | None = None
    need_bytes: int = 0
    why_not: str = ""


def projector_beside(local: LocalModel, engine: BackendType, settings: Settings) -> ImageProjector:
    """The projector beside `local`, as far as the `images` setting and the engine let it be used. Raises
    UnsupportedError where images were asked for and can't be had."""
    from localllm.errors import ModelFileError
    from localllm.library.catalog import read_header
    from localllm.planner.projector import projector_bytes

    wanted = settings.value("images")
    if wanted == "off" or local.mmproj is None:
        if wanted == "on":
            raise UnsupportedError(
                f"--images on: no image projector lies beside {local.name}",
                hint="`localllm pull` brings it (a file mmproj-*.gguf) where its repository has one",
            )
        return ImageProjector(why_not="switched off (--images off)" if local.mmproj is not None else "")
    why = engine.reads_images()
    if why is None:
        try:
            header = read_header(local.mmproj)
            size = local.mmproj.stat().st_size
            return ImageProjector(local.mmproj, projector_bytes(header.metadata, size))
        except (ModelFileError, OSError) as e:
            why = e.message if isinstance(e, LocalLLMError) else str(e)
    if wanted == "on":
        raise UnsupportedError(f"--images on: {why}")
    return ImageProjector(why_not=why)


def left_out(projector: ImageProjector, settings: Settings, free_bytes: int) -> ImageProjector:
    """No projector, since only `free_bytes` are left beside the model. Raises DoesNotFitError where images were asked for."""
    said = (
        f"the image projector needs {projector.need_bytes / 1e9:.1f} GB and {max(0, free_bytes) / 1e9:.1f} GB are left"
    )
    if settings.value("images") == "on":
        raise DoesNotFitError(f"--images on: {said}", hint="use a smaller --context, or a smaller quant of the model")
    return ImageProjector(why_not=said)


def image_readers(models: Sequence[Model]) -> tuple[Model, ...]:
    """Those of `models` that read images here: in GGUF files alone, since llama.cpp alone does."""
    seeing = (
        replace(m, variants=tuple(v for v in m.variants if v.format == "gguf")) for m in models if "image" in m.modality
    )
    return tuple(model for model in seeing if model.variants)


def image_facts(model: Model) -> str:
    """What an image comes to with `model`, and its projector where the catalog lists one; "" for one that reads none."""
    if "image" not in model.modality:
        return ""
    file = next((v for v in model.variants if v.mmproj_file), None)
    tokens = str(model.image_tokens) if model.image_tokens else "tokens an image: not known before it is loaded"
    return tokens + (f"; {file.mmproj_file}, {file.mmproj_bytes / 1e9:.1f} GB" if file is not None else "")
