"""SeeingLlamaCppBackend: a model with its image projector. Embeddings go into a sequence as tokens do, in steps of their own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import BackendFailure, Chunk, ImagePart, ImageRun, NoCellsError, Picture, SequenceId
from localllm_backends.llamacpp.backend import LlamaCppBackend
from localllm_backends.llamacpp.batch import EmbeddingBatch, Rows
from localllm_backends.llamacpp.positions import Placed
from localllm_backends.llamacpp.vision import Projector


class SeeingLlamaCppBackend(LlamaCppBackend):
    """A model that reads images too."""

    def __init__(self, *args: Any, projector: Projector, **options: Any) -> None:
        self._projector = projector
        self._two_dimensional = projector.two_dimensional
        self._projector_bytes = projector.bytes
        super().__init__(*args, **options)
        self.capabilities = replace(self.capabilities, sees=True, whole_images=projector.whole)
        self.info = replace(self.info, sees=True)

    def read(self, parts: Seq[str | Picture], *, add_bos: bool = False) -> list[list[int] | ImageRun]:
        """A prompt as runs of tokens and images. Any thread."""
        return self._projector.read(parts, add_bos=add_bos)

    def encode(self, run: ImageRun) -> NDArray[np.float32]:
        """The run's embeddings. Any thread, one at a time."""
        return self._projector.encode(run)

    def step(self, chunks: Seq[Chunk]) -> Rows:
        """One llama_decode over all chunks, or over one of an image."""
        if all(chunk.image is None for chunk in chunks):
            return super().step(chunks)
        self._check_owner()
        if len(chunks) != 1 or chunks[0].image is None:
            raise BackendFailure("an image goes into a step of its own")
        chunk, image = chunks[0], chunks[0].image
        n = len(chunk.tokens)
        if not 0 < n <= self.info.n_batch:
            raise BackendFailure(f"a step of {n} tokens is over the batch of {self.info.n_batch}")
        if n > self._ledger.free:
            raise NoCellsError(f"{n} KV cells needed, {self._ledger.free} of {self._ledger.capacity} free")
        start = self._ledger.length(chunk.sequence) - image.start
        positions = self._places(chunk.sequence, start, image, n)
        part = image.embeddings[image.start : image.start + n]
        outputs = min(chunk.outputs, n)
        batch = EmbeddingBatch(self._llama, chunk.sequence, part, positions, outputs)
        whole = self.capabilities.whole_images
        if whole:
            self._llama.llama_set_causal_attn(self._context, False)
        try:
            rows = self._sweep(batch, chunks, [(0, outputs)], outputs)
        finally:
            if whole:
                self._llama.llama_set_causal_attn(self._context, True)
        if self._two_dimensional:
            self._positions.place(chunk.sequence, Placed(start, image.run.n_tokens, image.run.n_positions))
        return rows

    def _can_undo(self, chunks: Seq[Chunk]) -> bool:
        """Not the middle of an image whose tokens stand at one position: its beginning would go with it."""
        return not (self._two_dimensional and any(c.image is not None and c.image.start for c in chunks))

    def _places(self, sequence: SequenceId, start: int, image: ImagePart, n: int) -> NDArray[np.int32]:
        """The positions of the next `n` tokens of an image that begins at token `start`."""
        first = self._positions.at(sequence, start)
        if image.run.grid is None:
            begins = first + image.start
            return np.arange(begins, begins + n, dtype=np.int32)[None, :]
        grid = first + image.run.grid[:, image.start : image.start + n]
        return np.concatenate([grid, np.zeros((1, n), dtype=np.int32)])

    def close(self) -> None:
        """Free it all."""
        self._projector.close()
        super().close()
