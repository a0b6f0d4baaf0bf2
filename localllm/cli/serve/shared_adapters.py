"""LoRA adapters of several names in one worker: what the worker loads, and what each name applies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from localllm.engine.worker import backends
from localllm.errors import LocalLLMError
from localllm.library.catalog import load_catalog, open_model
from localllm.library.types import LocalModel
from localllm.load import mlx_adapters
from localllm.load.adapters import adapter_named, file_and_scale
from localllm.settings import Settings
from localllm_catalog import kinds
from localllm_catalog.gguf import GgufHeader

# As in the `lora` setting: FILE[:SCALE].
Lora = tuple[str, ...]


def joined_adapters(own: Lora, others: Iterable[Lora]) -> Lora:
    """Return the adapters of a worker: `own` with their scales, then those of `others` with scale
    0, each file once."""
    loaded_adapters = list(own)
    files = {file_and_scale(text)[0] for text in own}
    for text in chain.from_iterable(others):
        file = file_and_scale(text)[0]
        if file not in files:
            files.add(file)
            loaded_adapters.append(f"{file}:0")
    return tuple(loaded_adapters)


def adapter_numbers(lora: Lora, loaded: Lora) -> tuple[tuple[int, float], ...] | None:
    """Return the adapters of `lora` as (number, scale) in `loaded`, or None if one is not
    loaded."""
    numbers = {file_and_scale(text)[0]: number for number, text in enumerate(loaded)}
    adapters = []
    for text in lora:
        file, scale = file_and_scale(text)
        if file not in numbers:
            return None
        adapters.append((numbers[file], scale))
    return tuple(adapters)


def can_share(local: LocalModel, loras: Sequence[Lora], settings: Settings) -> list[Lora]:
    """Return those of `loras` that a worker of `local` can load with others.

    An adapter that does not fit the model must not prevent the other names from loading. So the
    headers must show that it fits. A model that is split over machines has no adapters.
    """
    engine = backends.for_path(str(local.path), settings.value("backend")).declaration
    if not loras or not engine.adapters or settings.value("workers"):
        return []
    opened = open_model(local, load_catalog())
    if engine.adapters == "file" and not _is_text_model(opened.header):
        return []
    fitting = []
    for lora in loras:
        try:
            adapters = [adapter_named(text, opened, engine) for text in lora]
        except LocalLLMError:
            # The names that use it report this when they are loaded.
            continue
        paths = [Path(adapter.path) for adapter in adapters]
        if all(path.is_file() or mlx_adapters.fits(path, local.path) for path in paths):
            fitting.append(lora)
    return fitting


def _is_text_model(header: GgufHeader | None) -> bool:
    return header is not None and kinds.of_header(header.metadata, len(header.tensors)) == "model"
