"""Image input with llama.cpp's mtmd.

A projector, loaded together with the text model, turns pixels into embeddings. They are appended to
a sequence like tokens, in steps of their own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import (
    BackendFailure,
    Chunk,
    ImagePart,
    ImagePixels,
    ImageRun,
    LoadError,
    LoadSpec,
    OutOfMemoryError,
    SequenceId,
)
from localllm_backends.control_text import LiteralText
from localllm_backends.fingerprints import fingerprint
from localllm_backends.llamacpp.backend import LlamaCppBackend
from localllm_backends.llamacpp.batch import Batch, LlamaCppStepResult
from localllm_backends.llamacpp.cells import PlacedImage
from localllm_backends.llamacpp.devices import accelerators
from localllm_backends.llamacpp.native import bindings, bindings_version, log, purpose_bytes
from localllm_backends.llamacpp.threads import release_helpers, usable_cores
from localllm_backends.llamacpp.weights import check_file
from localllm_backends.shared_behaviour import image_of, owner_only

_TEXT = 0
_IMAGE = 1
WITHOUT = (
    "this build of llama-cpp-python reads no images: it was made without mtmd (`-DLLAVA_BUILD=OFF`)"
)


class Projector:
    """The mtmd context of the projector in `spec`, for the loaded `model`.

    Raises LoadError or OutOfMemoryError. Any thread may call `tokenize_images` and `encode_image`;
    the latter holds a lock, so calls run one at a time.
    """

    def __init__(self, llama: Any, model: Any, spec: LoadSpec) -> None:
        path = Path(spec.projector)
        try:
            mtmd = bindings("mtmd_cpp")
        except (ImportError, RuntimeError, AttributeError, OSError) as e:
            raise LoadError(f"{path.name!r} can't be loaded: {WITHOUT}") from e
        check_file(path)
        self._mtmd = mtmd
        self._lock = threading.Lock()
        mtmd.mtmd_log_set(log.callback, ctypes.c_void_p(0))
        params = mtmd.mtmd_context_params_default()
        params.use_gpu = spec.n_gpu_layers != 0
        if params.use_gpu and spec.placement.cards:  # by default mtmd takes the first of all GPUs
            os.environ.setdefault("MTMD_BACKEND_DEVICE", accelerators(spec.placement.cards)[0].name)
        params.print_timings = False
        # Allocate its buffers now, so that an image never fails for lack of memory after loading.
        params.warmup = True
        self._n_threads = spec.n_threads or usable_cores()
        params.n_threads = self._n_threads
        log.mark()
        self._context = mtmd.mtmd_init_from_file(str(path).encode(), model, params)
        if not self._context:
            why = log.reason()
            text = f"the image projector {path.name!r} can't be loaded: {why}"
            if "alloc" in why:
                raise OutOfMemoryError(text)
            raise LoadError(text)
        if not mtmd.mtmd_support_vision(self._context):
            mtmd.mtmd_free(self._context)
            raise LoadError(f"the projector {path.name!r} does not read images")
        self.two_dimensional = bool(mtmd.mtmd_decode_use_mrope(self._context))
        self.whole = bool(mtmd.mtmd_decode_use_non_causal(self._context, None))
        self.width = int(llama.llama_model_n_embd_inp(model))
        self.bytes = path.stat().st_size + purpose_bytes(log.buffers(), "compute")
        # Embeddings depend on the weights and on the library that computed them.
        self._identity = f"{fingerprint(path)} {bindings_version()}".encode()

    def close(self) -> None:
        with self._lock:
            if self._context is not None:
                self._mtmd.mtmd_free(self._context)
                self._context = None

    def tokenize_images(
        self, parts: Sequence[str | ImagePixels], *, add_bos: bool
    ) -> list[list[int] | ImageRun]:
        pictures = [p for p in parts if isinstance(p, ImagePixels)]
        runs: list[list[int] | ImageRun] = []
        # The layout of a prompt needs no pixels, so a large picture takes no longer than a small
        # one.
        with self._chunks(parts, pixels=False, add_bos=add_bos) as chunks:
            parts_of: Counter[int] = Counter()
            for chunk in chunks:
                if self._mtmd.mtmd_input_chunk_get_type(chunk) == _TEXT:
                    n = ctypes.c_size_t()
                    tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
                    runs.append(list(tokens[: n.value]))
                else:
                    number = int(self._mtmd.mtmd_input_chunk_get_id(chunk))
                    runs.append(self._run(chunk, pictures[number], parts_of[number]))
                    parts_of[number] += 1
        return runs

    def encode_image(self, run: ImageRun) -> NDArray[np.float32]:
        mtmd = self._mtmd
        with self._lock, self._chunks([run.pixels], pixels=True, add_bos=False) as chunks:
            images = [c for c in chunks if mtmd.mtmd_input_chunk_get_type(c) == _IMAGE]
            code = mtmd.mtmd_encode_chunk(self._context, images[run.part])
            # Another thread computes the steps. This one computes no more until the next image.
            release_helpers(self._n_threads)
            if code:
                raise BackendFailure(f"the image could not be encoded: {log.reason()}")
            found = mtmd.mtmd_get_output_embd(self._context)
            address = ctypes.cast(found, ctypes.POINTER(ctypes.c_float))
            values = np.ctypeslib.as_array(address, (run.n_tokens, self.width))
            return values.astype(np.float32, copy=True)

    def _run(self, chunk: Any, picture: ImagePixels, part: int) -> ImageRun:
        mtmd = self._mtmd
        n = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        grid = None
        if self.two_dimensional:
            image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
            places = [mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, i) for i in range(n)]
            grid = np.array([[p.t, p.y, p.x] for p in places], dtype=np.int32).T.copy()
        key = hashlib.blake2b(
            picture.key, digest_size=16, salt=part.to_bytes(4, "little"), key=self._identity[:64]
        )
        n_positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
        return ImageRun(picture, part, key.digest(), n, n_positions, grid)

    @contextmanager
    def _chunks(
        self, parts: Sequence[str | ImagePixels], *, pixels: bool, add_bos: bool
    ) -> Iterator[list[Any]]:
        """Yield the prompt in mtmd's chunks. Each bitmap's id is its index among the pictures."""
        mtmd = self._mtmd
        made: list[Any] = []
        n_pictures = 0
        with ExitStack() as freed:
            for part in parts:
                if isinstance(part, str):
                    data = part.encode("utf-8", "replace")
                    special = not isinstance(part, LiteralText)
                    text = mtmd.mtmd_input_text(data, len(data), False, special)
                    made.append(mtmd.mtmd_input_part(ctypes.pointer(text), None))
                    continue
                numbers = None
                if pixels:
                    address = ctypes.c_char_p(part.data)
                    numbers = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
                bitmap = mtmd.mtmd_bitmap_init(part.width, part.height, numbers)
                freed.callback(mtmd.mtmd_bitmap_free, bitmap)
                mtmd.mtmd_bitmap_set_id(bitmap, str(n_pictures).encode())
                n_pictures += 1
                made.append(mtmd.mtmd_input_part(None, bitmap))
            native = mtmd.mtmd_input_chunks_init()
            freed.callback(mtmd.mtmd_input_chunks_free, native)
            list_of_parts = ctypes.POINTER(mtmd.mtmd_input_part) * len(made)
            pointers = list_of_parts(*(ctypes.pointer(part) for part in made))
            code = mtmd.mtmd_tokenize_from_parts(
                self._context, native, pointers, len(made), add_bos
            )
            if code:
                raise BackendFailure(f"the image could not be read: {log.reason(f'code {code}')}")
            n_chunks = mtmd.mtmd_input_chunks_size(native)
            yield [mtmd.mtmd_input_chunks_get(native, i) for i in range(n_chunks)]


class LlamaCppVisionBackend(LlamaCppBackend):
    def __init__(self, llama: Any, model: Any, context: Any, spec: LoadSpec, *rest: Any) -> None:
        self._projector = projector = Projector(llama, model, spec)
        self._two_dimensional = projector.two_dimensional
        self._projector_bytes = projector.bytes
        super().__init__(llama, model, context, spec, *rest)
        self.capabilities = replace(self.capabilities, vision=True, whole_images=projector.whole)
        self.info = replace(self.info, vision=True)

    def tokenize_images(
        self, parts: Sequence[str | ImagePixels], *, add_bos: bool = False
    ) -> list[list[int] | ImageRun]:
        cut: list[str | ImagePixels] = []
        for part in parts:
            if isinstance(part, str):
                cut.extend(self.read_anyway.pieces(part))
            else:
                cut.append(part)
        return self._projector.tokenize_images(cut, add_bos=add_bos)

    def encode_image(self, run: ImageRun) -> NDArray[np.float32]:
        return self._projector.encode_image(run)

    @owner_only
    def step(self, chunks: Sequence[Chunk]) -> LlamaCppStepResult:
        """Decode all chunks with one llama_decode, or a single chunk of an image."""
        image = image_of(chunks)
        if image is None:
            return super().step(chunks)
        [chunk] = chunks
        n = len(chunk.tokens)
        outputs = min(chunk.outputs, n)
        self._check_step(n, outputs)
        start = self._ledger.length(chunk.sequence) - image.start
        positions = self._places(chunk.sequence, start, image, n)
        part = image.embeddings[image.start : image.start + n]
        batch = Batch(self._llama, n, width=part.shape[1], tokens=False, dimensions=len(positions))
        batch.add(chunk.sequence, 0, [0] * n, outputs)
        batch.rows[:] = part
        batch.place(positions)
        self._llama.llama_set_causal_attn(self._context, not self._projector.whole)
        try:
            rows = self._sweep(batch, chunks)
        finally:
            self._llama.llama_set_causal_attn(self._context, True)
        if self._two_dimensional:
            placed = PlacedImage(start, image.run.n_tokens, image.run.n_positions)
            self._ledger.place(chunk.sequence, placed)
        return rows

    def _places(
        self, sequence: SequenceId, start: int, image: ImagePart, n: int
    ) -> NDArray[np.int32]:
        """Return the positions of the next `n` tokens of an image that starts at token `start`."""
        first = self._ledger.position(sequence, start)
        if image.run.grid is None:
            begins = first + image.start
            return np.arange(begins, begins + n, dtype=np.int32)[None, :]
        grid = first + image.run.grid[:, image.start : image.start + n]
        return np.concatenate([grid, np.zeros((1, n), dtype=np.int32)])

    def close(self) -> None:
        self._projector.close()
        super().close()
