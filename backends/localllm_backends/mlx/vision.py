"""Image input with mlx-vlm.

Its processor and vision encoder turn pixels into embeddings, which mlx-lm's model reads in place of
tokens. The rest of mlx-vlm's model is not used. The language model is the one that serves text,
with our memory, so image tokens are cached, truncated and forked like other tokens.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from localllm_backends.contract import (
    BackendFailure,
    Chunk,
    ImagePixels,
    LoadError,
    LoadSpec,
    Media,
    MediaRun,
    MemoryReport,
    SoundSamples,
)
from localllm_backends.mlx import memory
from localllm_backends.mlx.backend import Loaded, MlxBackend
from localllm_backends.mlx.embedding_reader import EmbeddingReader
from localllm_backends.mlx.files import fingerprint
from localllm_backends.mlx.load import read_checkpoint, read_weights
from localllm_backends.mlx.results import MlxStepResult
from localllm_backends.mlx.stepping import WHOLE_TOKENS
from localllm_backends.mlx.towers import (
    FAMILIES,
    MAX_IMAGE_TOKENS,
    Family,
    image_buffer_bytes,
    layers_attending_ahead,
    max_tokens_per_image,
    unsupported_reason,
)
from localllm_backends.shared_behaviour import media_of, owner_only

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Number of images whose layout is cached, because the prompt is laid out again in every turn.
_LAID_OUT = 1024
# Sides are rounded up to full patches.
_ROUNDING_MARGIN = 0.98
_BLANK = ImagePixels(32, 32, bytes(3 * 32 * 32), b"blank")
_WITHOUT = "load the model without images: `--images off`"


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of an image in a prompt: tokens before it, number of embeddings, tokens after it.

    `grid`: see MediaRun.
    """

    before: list[int]
    n_tokens: int
    after: list[int]
    grid: NDArray[np.int32] | None = None


class ImageEncoder:
    """A checkpoint's image processor and vision encoder.

    Any thread may call `lay_out` and `encode`. Each has a lock of its own, so prompts can be laid
    out while an image is encoded.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], language: Any) -> None:
        reason = unsupported_reason(config)
        if reason is not None:
            raise LoadError(f"{folder.name!r}: images are not supported: {reason}", _WITHOUT)
        from importlib.metadata import version

        self._config = config
        self._encoding = threading.Lock()
        self._processing = threading.Lock()
        self._device = mx.default_device()
        family = FAMILIES[str(config["model_type"])]
        self._processor = _processor(folder, family)
        self._mark = family.mark or self._processor.image_token
        self.tower = _tower(folder, language)
        # mlx-lm's model multiplies embeddings by this factor, mlx-vlm's does not.
        self._scale = getattr(language.language_model.model, "embed_scale", 1.0)
        self._laid_out: dict[bytes, _Layout] = {}
        files = [folder / name for name in _PROCESSOR_FILES]
        settings = b"".join(file.read_bytes() for file in files if file.is_file())
        made_by = f"{fingerprint(folder)} {version('mlx-vlm')} {version('mlx')}".encode()
        # Embeddings depend on the weights and on the library that computed them.
        self._identity = hashlib.blake2b(settings + made_by, digest_size=32).digest()

    def lay_out(self, picture: ImagePixels) -> list[list[int] | MediaRun]:
        found = self._laid_out.get(picture.key)
        if found is None:
            found = self._layout(self._inputs(picture))
            if len(self._laid_out) >= _LAID_OUT:
                self._laid_out.clear()
            self._laid_out[picture.key] = found
        key = hashlib.blake2b(picture.key, digest_size=16, key=self._identity)
        n_tokens = found.n_tokens
        grid = found.grid
        n_positions = n_tokens if grid is None else int(grid.max()) + 1
        run = MediaRun(picture, 0, key.digest(), n_tokens, n_positions, grid)
        return [part for part in (found.before, run, found.after) if part]

    def encode(self, run: MediaRun) -> NDArray[np.float32]:
        with self._encoding, mx.stream(self._device):
            memory.require(image_buffer_bytes(self._config), "the image")
            picture = run.media
            assert isinstance(picture, ImagePixels)
            inputs = self._inputs(picture)
            first = len(self._layout(inputs).before)
            ids = inputs.pop("input_ids")
            inputs["mask"] = inputs.pop("attention_mask", None)
            model_output = self.tower.get_input_embeddings(ids, **inputs)
            rows = model_output.inputs_embeds[0, first : first + run.n_tokens] / self._scale
            parts = [rows, *(model_output.deepstack_visual_embeds or ())]
            embeddings = mx.concatenate(parts, axis=-1).astype(mx.float32)
            return np.array(embeddings)

    def close(self) -> None:
        with self._encoding:
            self.tower = None

    def _inputs(self, picture: ImagePixels) -> dict[str, Any]:
        """Return the processor's output for one image.

        The image is scaled down until it takes at most MAX_IMAGE_TOKENS tokens.
        """
        from PIL import Image

        image = Image.frombytes("RGB", (picture.width, picture.height), picture.data)
        while True:
            try:
                with self._processing:
                    processed = self._processor(
                        images=[image], text=[self._mark], add_special_tokens=False
                    )
            except Exception as e:
                raise BackendFailure(f"this model's image processor failed: {e}") from e
            inputs = dict(processed)
            n = inputs["input_ids"][0].tolist().count(self._processor.image_token_id)
            if n <= MAX_IMAGE_TOKENS:
                return inputs
            height, width = inputs["pixel_values"].shape[-2:]
            share = _ROUNDING_MARGIN * math.sqrt(MAX_IMAGE_TOKENS / n)
            smaller = (max(1, int(width * share)), max(1, int(height * share)))
            image = image.resize(smaller)

    def _layout(self, inputs: Mapping[str, Any]) -> _Layout:
        """Return the image's layout.

        Its span is from its first to its last image token, including tokens for the ends of rows.
        """
        ids: list[int] = inputs["input_ids"][0].tolist()
        token = self._processor.image_token_id
        sides = inputs.get("image_grid_thw")
        places = [i for i, each in enumerate(ids) if each == token]
        if not places:
            raise BackendFailure("the image processor of this model returned no image tokens")
        first = places[0]
        last = places[-1] + 1
        grid = None
        if sides is not None:
            time, height, width = sides[0].tolist()
            merged = self._processor.image_processor.merge_size
            shape = time, height // merged, width // merged
            grid = np.indices(shape, dtype=np.int32).reshape(3, -1)
        return _Layout(ids[:first], last - first, ids[last:], grid)


def _processor(folder: Path, family: Family) -> Any:
    module = family.module
    try:
        module_of_processor = importlib.import_module(
            f"mlx_vlm.models.{module}.processing_{module}"
        )
        with warnings.catch_warnings():
            # Warnings about an audio processor, which is not used.
            warnings.simplefilter("ignore")
            # Run no code from the checkpoint, and download no files.
            processor = getattr(module_of_processor, family.processor).from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True
            )
    except Exception as e:
        raise LoadError(
            f"the image processor of {folder.name!r} can't be read: {e}", _WITHOUT
        ) from e
    if family.rows:
        by_pixels = processor.image_processor
        side = by_pixels.patch_size * by_pixels.merge_size
        by_pixels.max_pixels = min(by_pixels.max_pixels, MAX_IMAGE_TOKENS * side**2)
    return processor


def _tower(folder: Path, language: Any) -> Any:
    """Load mlx-vlm's model of the checkpoint without reading its weights.

    The embedding of `language` replaces its language model.
    """
    from mlx_vlm.utils import load_model

    try:
        tower = load_model(folder, lazy=True)
    except Exception as e:
        raise LoadError(
            f"mlx-vlm can't load the vision encoder of {folder.name!r}: {e}", _WITHOUT
        ) from e
    tower.audio_tower = tower.embed_audio = None
    text = language.language_model.model
    embeds = SimpleNamespace(
        embed_tokens=text.embed_tokens, embed_scale=1.0, hidden_size_per_layer_input=0
    )
    tower.language_model = SimpleNamespace(model=embeds, get_rope_index=_no_rope_index)
    return tower


def _no_rope_index(*_: Any) -> tuple[None, None]:
    """The processor's grid determines the positions instead."""
    return None, None


def load_with_vision(
    spec: LoadSpec, on_progress: Callable[[float], None] | None = None
) -> MlxVisionBackend:
    """Load the checkpoint with its vision encoder. Raises LoadError or OutOfMemoryError."""
    loaded = read_checkpoint(spec, on_progress)
    name = loaded.folder.name
    encoder = ImageEncoder(loaded.folder, loaded.config, loaded.model)
    weights = [a for _, a in tree_flatten(encoder.tower.parameters())]
    read_weights(weights, name)
    try:
        # In this thread: the encoder still has to create arrays from its config, and this thread
        # owns their stream.
        for run in encoder.lay_out(_BLANK):
            if isinstance(run, MediaRun):
                encoder.encode(run)
    except BackendFailure:
        raise
    except Exception as e:
        raise LoadError(
            f"the vision encoder of {name!r} failed on a test image: {e}", _WITHOUT
        ) from e
    return MlxVisionBackend(loaded, encoder, sum(int(a.nbytes) for a in weights))


class MlxVisionBackend(MlxBackend):
    """An MlxBackend whose prompts may contain images."""

    def __init__(self, loaded: Loaded, encoder: ImageEncoder, tower_bytes: int) -> None:
        self._encoder = encoder
        self._tower_bytes = tower_bytes
        ahead = layers_attending_ahead(loaded.config)
        if ahead:
            loaded = replace(
                loaded, n_batch=max(loaded.n_batch, max_tokens_per_image(loaded.config))
            )
        super().__init__(loaded)
        self._reader: Any = EmbeddingReader(loaded.model, ahead, self._shifts)
        rows = FAMILIES[str(loaded.config["model_type"])].rows
        if rows:
            self._reader.wrap(loaded.config, rows)
        self.stepper.model = self._reader
        self.capabilities = replace(self.capabilities, vision=True, images_in_one_step=bool(ahead))
        self.info = replace(self.info, vision=True)

    def tokenize_media(
        self, parts: Sequence[str | Media], *, add_bos: bool = False
    ) -> list[list[int] | MediaRun]:
        runs: list[list[int] | MediaRun] = [self.tokenize("", add_bos=add_bos)]
        for part in parts:
            if isinstance(part, ImagePixels):
                runs += self._encoder.lay_out(part)
            elif isinstance(part, SoundSamples):
                raise BackendFailure("sounds are not supported with MLX")
            else:
                runs.append(self.tokenize(part))
        return [run for run in runs if run]

    def encode_media(self, run: MediaRun) -> NDArray[np.float32]:
        return self._encoder.encode(run)

    @owner_only
    def step(self, chunks: Sequence[Chunk]) -> MlxStepResult:
        """Run one step over all chunks, or over a single chunk of an image."""
        image = media_of(chunks)
        if image is None:
            return super().step(chunks)
        [chunk] = chunks
        n = len(chunk.tokens)
        seq = self._seq(chunk.sequence)
        run = image.run
        stop = image.start + n
        grid = run.grid
        if grid is not None:
            first = seq.position(seq.length - image.start)
            grid = first + grid[:, image.start : stop]
        fewer = run.n_tokens - run.n_positions
        if stop == run.n_tokens and fewer > 0:
            seq.images = [*seq.images, (seq.length + n, fewer)]
        # The prediction after the last step does not apply to image tokens.
        seq.predicted = None
        self.stepper.recompute(seq)
        if self.capabilities.images_in_one_step:
            self.stepper.undivided = n
        self._reader.set_embeddings(image.embeddings[image.start : stop], grid)
        try:
            result = super().step([chunk._replace(tokens=[0] * n)])
        finally:
            self._reader.clear()
            self.stepper.undivided = WHOLE_TOKENS
            seq.cut_images(seq.length)
        # Image tokens can't be read again for a rewind.
        seq.undo = None
        return result

    def _shifts(self, caches: Any) -> list[int]:
        """Return for each row of `caches` the difference between position and token count."""
        batches = {id(seq.batch.caches): seq.batch for seq in self._seqs.values()}
        seqs = batches[id(caches)].seqs
        return [seq.position(seq.length) - seq.length for seq in seqs]

    def memory(self) -> MemoryReport:
        return replace(super().memory(), projector_bytes=self._tower_bytes)

    def close(self) -> None:
        self._encoder.close()
        self._reader = None
        super().close()
