"""Images through mlx-vlm: its processor and tower turn pixels into embeddings, which mlx-lm's model
reads in the place of tokens.

Of mlx-vlm's own model nothing else is kept: the language model is the one that serves text, with
our memory, so an image's tokens are cached, cut and forked as any others are.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import (
    BackendFailure,
    Chunk,
    ImagePixels,
    ImageRun,
    LoadError,
    LoadSpec,
    MemoryReport,
)
from localllm_backends.mlx import memory
from localllm_backends.mlx.backend import Loaded, MlxBackend
from localllm_backends.mlx.files import fingerprint
from localllm_backends.mlx.load import read_checkpoint, read_weights
from localllm_backends.mlx.results import MlxStepResult
from localllm_backends.mlx.towers import (
    MOST_TOKENS,
    PROCESSORS,
    image_buffer_bytes,
    why_not,
)

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Prompts are laid out anew in every turn: so many images are known by their hash.
_LAID_OUT = 1024
# Sides are rounded up to whole patches.
_A_LITTLE_LESS = 0.98
_BLANK = ImagePixels(32, 32, bytes(3 * 32 * 32), b"blank")
_WITHOUT = "`--images off` loads it without"


# What an image comes to in a prompt: the tokens before it, those that embeddings stand for, and
# the tokens behind it.
_Layout = tuple[list[int], list[int], list[int]]


class Eyes:
    """A checkpoint's processor and tower. `lay_out` may be called by any thread, `encode` by one at
    a time (each holds a lock: prompts are laid out while an image is encoded)."""

    def __init__(self, folder: Path, config: Mapping[str, Any], language: Any) -> None:
        reason = why_not(config)
        if reason is not None:
            raise LoadError(f"{folder.name!r} reads no images here: {reason}", _WITHOUT)
        from importlib.metadata import version

        self._config = config
        self._encoding, self._processing = threading.Lock(), threading.Lock()
        self._device = mx.default_device()
        self._processor = _processor(folder, str(config["model_type"]))
        self.tower = _tower(folder, language)
        self._laid_out: dict[bytes, _Layout] = {}
        digest = hashlib.blake2b(digest_size=32)
        for name in _PROCESSOR_FILES:
            if (folder / name).is_file():
                digest.update((folder / name).read_bytes())
        digest.update(f"{fingerprint(folder)} {version('mlx-vlm')} {version('mlx')}".encode())
        # Embeddings are bound to the weights that made them, and to the library that computed them.
        self._identity = digest.digest()

    def lay_out(self, picture: ImagePixels) -> list[list[int] | ImageRun]:
        found = self._laid_out.get(picture.key)
        if found is None:
            found = self._split(self._inputs(picture)["input_ids"][0].tolist())
            if len(self._laid_out) >= _LAID_OUT:
                self._laid_out.clear()
            self._laid_out[picture.key] = found
        key = hashlib.blake2b(picture.key, digest_size=16, key=self._identity)
        before, inner, behind = found
        run = ImageRun(picture, 0, key.digest(), len(inner), len(inner))
        return [part for part in (before, run, behind) if part]

    def encode(self, run: ImageRun) -> NDArray[np.float32]:
        with self._encoding, mx.stream(self._device):
            memory.require(image_buffer_bytes(self._config), "the image")
            inputs = self._inputs(run.pixels)
            ids = inputs.pop("input_ids")
            inputs["mask"] = inputs.pop("attention_mask", None)
            made = self.tower.get_input_embeddings(ids, **inputs).inputs_embeds[0]
            first = len(self._split(ids[0].tolist())[0])
            return np.array(made[first : first + run.n_tokens].astype(mx.float32))

    def close(self) -> None:
        with self._encoding:
            self.tower = None

    def _inputs(self, picture: ImagePixels) -> dict[str, Any]:
        """The image alone as mlx-vlm's processor has it for the model; made smaller where it would
        come to more tokens than are read."""
        from PIL import Image

        image = Image.frombytes("RGB", (picture.width, picture.height), picture.data)
        inputs = self._processed(image)
        n = self._count(inputs)
        while n > MOST_TOKENS:
            height, width = inputs["pixel_values"].shape[-2:]
            share = _A_LITTLE_LESS * math.sqrt(MOST_TOKENS / n)
            image = image.resize((max(1, int(width * share)), max(1, int(height * share))))
            inputs = self._processed(image)
            n = self._count(inputs)
        return inputs

    def _processed(self, image: Any) -> dict[str, Any]:
        mark = self._processor.image_token
        try:
            with self._processing:
                return dict(self._processor(images=[image], text=[mark], add_special_tokens=False))
        except Exception as e:
            raise BackendFailure(f"the image can't be read by this model: {e}") from e

    def _count(self, inputs: Mapping[str, Any]) -> int:
        ids: list[int] = inputs["input_ids"][0].tolist()
        return ids.count(self._processor.image_token_id)

    def _split(self, ids: list[int]) -> _Layout:
        """The span from the first to the last token of the image is its own, with the ends of rows
        in it."""
        token = self._processor.image_token_id
        places = [i for i, each in enumerate(ids) if each == token]
        if not places:
            raise BackendFailure("the image comes to no tokens: this model's processor has none")
        first, last = places[0], places[-1] + 1
        return ids[:first], ids[first:last], ids[last:]


def _processor(folder: Path, family: str) -> Any:
    try:
        made = importlib.import_module(f"mlx_vlm.models.{family}.processing_{family}")
        kind = getattr(made, PROCESSORS[family])
        # Never the checkpoint's own code, nor anything from the network.
        return kind.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as e:
        raise LoadError(
            f"the image processor of {folder.name!r} can't be read: {e}", _WITHOUT
        ) from e


def _tower(folder: Path, language: Any) -> Any:
    """mlx-vlm's model of the checkpoint, its weights not read yet, with the embedding of `language`
    in the place of its own language model."""
    from mlx_vlm.utils import load_model

    try:
        tower = load_model(folder, lazy=True)
    except Exception as e:
        said = f"mlx-vlm can't load the image tower of {folder.name!r}: {e}"
        raise LoadError(said, _WITHOUT) from e
    tower.language_model = SimpleNamespace(model=language.language_model.model)
    return tower


class _EmbeddingReader:
    """The language model as a step calls it: while embeddings are `pending`, it reads those."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.pending: Any = None

    def __call__(self, ids: Any, cache: Any) -> Any:
        if self.pending is None:
            return self._model(ids, cache=cache)
        n = int(ids.shape[1])
        now, later = self.pending[:, :n], self.pending[:, n:]
        self.pending = later if later.shape[1] else None
        return self._model(ids, cache=cache, input_embeddings=now)


def load_seeing(
    spec: LoadSpec, on_progress: Callable[[float], None] | None = None
) -> MlxVisionBackend:
    """The checkpoint with its tower. LoadError or OutOfMemoryError."""
    loaded = read_checkpoint(spec, on_progress)
    name = loaded.folder.name
    eyes = Eyes(loaded.folder, loaded.config, loaded.model)
    n_bytes = read_weights(eyes.tower, name, None)
    try:
        # In this thread, whose streams have what the tower has yet to make of its config.
        eyes.encode(next(run for run in eyes.lay_out(_BLANK) if isinstance(run, ImageRun)))
    except BackendFailure:
        raise
    except Exception as e:
        raise LoadError(f"the image tower of {name!r} does not run: {e}", _WITHOUT) from e
    return MlxVisionBackend(loaded, eyes, n_bytes)


class MlxVisionBackend(MlxBackend):
    """An MlxBackend whose prompts may have images."""

    def __init__(self, loaded: Loaded, eyes: Eyes, tower_bytes: int) -> None:
        self._eyes, self._tower_bytes = eyes, tower_bytes
        super().__init__(loaded)
        embed = loaded.model.language_model.model.embed_tokens
        self._dtype = embed(mx.zeros((1, 1), dtype=mx.int32)).dtype
        self._reader = _EmbeddingReader(loaded.model)
        self.stepper.model = self._reader
        self.capabilities = replace(self.capabilities, vision=True)
        self.info = replace(self.info, vision=True)

    def tokenize_images(
        self, parts: Sequence[str | ImagePixels], *, add_bos: bool = False
    ) -> list[list[int] | ImageRun]:
        runs: list[list[int] | ImageRun] = [self.tokenize("", add_bos=add_bos)]
        for part in parts:
            if isinstance(part, ImagePixels):
                runs += self._eyes.lay_out(part)
            else:
                runs.append(self.tokenize(part))
        return [run for run in runs if run]

    def encode_image(self, run: ImageRun) -> NDArray[np.float32]:
        return self._eyes.encode(run)

    def step(self, chunks: Sequence[Chunk]) -> MlxStepResult:
        """One sweep over all chunks, or over one of an image."""
        if all(chunk.image is None for chunk in chunks):
            return super().step(chunks)
        if len(chunks) != 1 or chunks[0].image is None:
            raise BackendFailure("an image goes into a step of its own")
        [chunk], image, n = chunks, chunks[0].image, len(chunks[0].tokens)
        part = image.embeddings[image.start : image.start + n]
        # No token is the one that was expected behind the last.
        self._line(chunk.sequence).predicted = None
        self._reader.pending = mx.array(part)[None].astype(self._dtype)
        try:
            return super().step([chunk._replace(tokens=[0] * n)])
        finally:
            self._reader.pending = None

    def memory(self) -> MemoryReport:
        return replace(super().memory(), projector_bytes=self._tower_bytes)

    def close(self) -> None:
        self._eyes.close()
        self._reader = _EmbeddingReader(None)
        super().close()
