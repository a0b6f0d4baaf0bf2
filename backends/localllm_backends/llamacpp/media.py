"""Image and audio input with llama.cpp's mtmd.

A projector, loaded together with the text model, turns pixels and samples into embeddings. They are
appended to a sequence like tokens, in steps of their own.
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
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import (
    BackendFailure,
    Chunk,
    ImagePixels,
    LoadError,
    LoadSpec,
    Media,
    MediaPart,
    MediaRun,
    OutOfMemoryError,
    SequenceId,
    SoundSamples,
)
from localllm_backends.control_text import LiteralText
from localllm_backends.fingerprints import fingerprint
from localllm_backends.llamacpp.backend import LlamaCppBackend
from localllm_backends.llamacpp.batch import Batch, LlamaCppStepResult
from localllm_backends.llamacpp.binding.layout import check_layout
from localllm_backends.llamacpp.cells import PlacedMedia
from localllm_backends.llamacpp.devices import accelerators
from localllm_backends.llamacpp.gguf_header import NativeHeader
from localllm_backends.llamacpp.native import bindings_version, log, purpose_bytes
from localllm_backends.llamacpp.threads import release_helpers, usable_cores
from localllm_backends.llamacpp.weights import check_file
from localllm_backends.shared_behaviour import media_of, owner_only

WITHOUT = (
    "this build of llama-cpp-python does not support images or audio: it was built without "
    "mtmd (`-DLLAVA_BUILD=OFF`)"
)

# Sounds are float32 samples.
_SAMPLE_BYTES = 4
# Layouts of sounds that are kept.
_KNOWN_SOUNDS = 64


def _check_complete(path: Path) -> None:
    """Raise LoadError if the file ends before its last tensor, which mtmd does not check."""
    try:
        end_bytes = NativeHeader(path).end_bytes
    except LoadError as e:
        raise LoadError(f"the projector {path.name!r} can't be loaded: {e}") from e
    size_bytes = path.stat().st_size
    if size_bytes < end_bytes:
        raise LoadError(
            f"the projector {path.name!r} can't be loaded: it has {size_bytes:,} of {end_bytes:,} "
            "bytes. Download it again"
        )


class Projector:
    """The mtmd context of the projector in `spec`, for the loaded `model`.

    Raises LoadError or OutOfMemoryError. Any thread may call `tokenize_media` and `encode_media`;
    the latter holds a lock, so calls run one at a time.
    """

    def __init__(self, llama: Any, model: Any, spec: LoadSpec) -> None:
        path = Path(spec.projector)
        mtmd = llama
        missing = llama.missing("images")
        if missing:
            raise LoadError(f"{path.name!r} can't be loaded: {WITHOUT} ({missing})")
        check_layout(llama, images=True)
        check_file(path)
        _check_complete(path)
        self._mtmd = mtmd
        self._lock = threading.Lock()
        mtmd.mtmd_log_set(log.callback, None)
        params = mtmd.mtmd_context_params_default()
        params.use_gpu = spec.n_gpu_layers != 0
        if params.use_gpu and spec.placement.cards:  # by default mtmd takes the first of all GPUs
            os.environ.setdefault("MTMD_BACKEND_DEVICE", accelerators(spec.placement.cards)[0].name)
        params.print_timings = False
        # Allocate its buffers now, so that a request never fails for lack of memory after loading.
        params.warmup = True
        self._n_threads = spec.n_threads or usable_cores()
        params.n_threads = self._n_threads
        self._context = self._opened(path, model, params)
        self.vision = bool(mtmd.mtmd_support_vision(self._context))
        self.audio_rate_hz = 0
        if not llama.missing("audio") and mtmd.mtmd_support_audio(self._context):
            self.audio_rate_hz = int(mtmd.mtmd_get_audio_sample_rate(self._context))
        if not self.vision and self.audio_rate_hz <= 0:
            mtmd.mtmd_free(self._context)
            raise LoadError(f"the projector {path.name!r} reads neither images nor sounds here")
        self.two_dimensional = bool(mtmd.mtmd_decode_use_mrope(self._context))
        self.non_causal = bool(mtmd.mtmd_decode_use_non_causal(self._context, None))
        self.width = int(llama.llama_model_n_embd_inp(model))
        self.bytes = path.stat().st_size + purpose_bytes(log.buffers(), "compute")
        # Embeddings depend on the weights and on the library that computed them.
        self._identity = f"{fingerprint(path)} {bindings_version()}".encode()
        self._adds_end = bool(llama.llama_vocab_get_add_eos(llama.llama_model_get_vocab(model)))
        # By the number of samples. A sound comes back with every turn.
        self._layout_of_sound = lru_cache(_KNOWN_SOUNDS)(self._measure_sound)
        # The sound that was encoded last: its key, its chunks, and the resources that they hold.
        self._sound = b""
        self._sound_chunks: list[Any] = []
        self._held = ExitStack()

    def _opened(self, path: Path, model: Any, params: Any) -> Any:
        log.mark()
        context = self._mtmd.mtmd_init_from_file(str(path).encode(), model, params)
        if context:
            return context
        why = log.reason()
        text = f"the projector {path.name!r} can't be loaded: {why}"
        if "alloc" in why:
            raise OutOfMemoryError(text)
        raise LoadError(text)

    def close(self) -> None:
        with self._lock:
            self._forget_sound()
            if self._context is not None:
                self._mtmd.mtmd_free(self._context)
                self._context = None

    def tokenize_media(
        self, parts: Sequence[str | Media], *, add_bos: bool
    ) -> list[list[int] | MediaRun]:
        if self._adds_end:
            return self._runs(parts, add_bos=add_bos)
        runs: list[list[int] | MediaRun] = []
        for piece in _apart_from_sounds(parts):
            if isinstance(piece, SoundSamples):
                runs += self._runs_of_sound(piece)
            else:
                runs += self._runs(piece, add_bos=add_bos)
                add_bos = False
        return runs

    def _runs_of_sound(self, sound: SoundSamples) -> Iterator[list[int] | MediaRun]:
        part = 0
        for piece in self._layout_of_sound(sound.n_samples):
            if isinstance(piece, list):
                yield piece.copy()
                continue
            n_tokens, n_positions = piece
            yield MediaRun(sound, part, self._key(sound, part), n_tokens, n_positions)
            part += 1

    def _measure_sound(self, n_samples: int) -> list[list[int] | tuple[int, int]]:
        """The layout of a sound: the tokens of texts, and the numbers of tokens and positions of
        its parts.

        mtmd computes a spectrum to count them, which takes a second for half an hour.
        """
        sound = SoundSamples(bytes(n_samples * _SAMPLE_BYTES), b"")
        return [
            run if isinstance(run, list) else (run.n_tokens, run.n_positions)
            for run in self._runs([sound], add_bos=False)
        ]

    def _runs(self, parts: Sequence[str | Media], *, add_bos: bool) -> list[list[int] | MediaRun]:
        media = [p for p in parts if not isinstance(p, str)]
        mtmd = self._mtmd
        runs: list[list[int] | MediaRun] = []
        # The layout of a prompt needs no pixels, so a large picture takes no longer than a small
        # one.
        with self._chunks(parts, filled=False, add_bos=add_bos) as chunks:
            parts_of: Counter[int] = Counter()
            for chunk in chunks:
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    n = ctypes.c_size_t()
                    tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
                    runs.append(list(tokens[: n.value]))
                else:
                    number = int(mtmd.mtmd_input_chunk_get_id(chunk))
                    runs.append(self._run(chunk, media[number], parts_of[number]))
                    parts_of[number] += 1
        return runs

    def encode_media(self, run: MediaRun) -> NDArray[np.float32]:
        mtmd = self._mtmd
        with self._lock, self._parts_of(run.media) as chunks:
            code = mtmd.mtmd_encode_chunk(self._context, chunks[run.part])
            # Another thread computes the steps. This one computes no more until the next run.
            release_helpers(self._n_threads)
            if code:
                raise BackendFailure(f"the input could not be encoded: {log.reason()}")
            found = mtmd.mtmd_get_output_embd(self._context)
            address = ctypes.cast(found, ctypes.POINTER(ctypes.c_float))
            values = np.ctypeslib.as_array(address, (run.n_tokens, self.width)).copy()
            if run.part == len(chunks) - 1:
                self._forget_sound()
            return values

    @contextmanager
    def _parts_of(self, medium: Media) -> Iterator[list[Any]]:
        """Yield the chunks of an image or a sound.

        Those of a sound are kept for its next part: the spectrum of a long sound takes seconds.
        """
        text = self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT
        kind_of = self._mtmd.mtmd_input_chunk_get_type
        if isinstance(medium, ImagePixels):
            with self._chunks([medium], filled=True, add_bos=False) as chunks:
                yield [chunk for chunk in chunks if kind_of(chunk) != text]
            return
        if self._sound != medium.key:
            self._forget_sound()
            opened = self._chunks([medium], filled=True, add_bos=False)
            chunks = self._held.enter_context(opened)
            self._sound_chunks = [chunk for chunk in chunks if kind_of(chunk) != text]
            self._sound = medium.key
        yield self._sound_chunks

    def _forget_sound(self) -> None:
        self._sound = b""
        self._sound_chunks = []
        self._held.close()

    def _run(self, chunk: Any, medium: Media, part: int) -> MediaRun:
        mtmd = self._mtmd
        n = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        grid = None
        if self.two_dimensional and isinstance(medium, ImagePixels):
            image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
            places = [mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, i) for i in range(n)]
            grid = np.array([[p.t, p.y, p.x] for p in places], dtype=np.int32).T.copy()
        n_positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
        return MediaRun(medium, part, self._key(medium, part), n, n_positions, grid)

    def _key(self, medium: Media, part: int) -> bytes:
        salt = part.to_bytes(4, "little")
        key = hashlib.blake2b(medium.key, digest_size=16, salt=salt, key=self._identity[:64])
        return key.digest()

    @contextmanager
    def _chunks(
        self, parts: Sequence[str | Media], *, filled: bool, add_bos: bool
    ) -> Iterator[list[Any]]:
        """Yield the prompt in mtmd's chunks. Each bitmap's id is its index among the media.

        `filled`: the bitmaps have their pixels or samples.
        """
        mtmd = self._mtmd
        chunks: list[Any] = []
        n_media = 0
        with ExitStack() as freed:
            for part in parts:
                if isinstance(part, str):
                    data = part.encode("utf-8", "replace")
                    special = not isinstance(part, LiteralText)
                    text = mtmd.mtmd_input_text(data, len(data), False, special)
                    chunks.append(mtmd.mtmd_input_part(ctypes.pointer(text), None))
                    continue
                bitmap = self._bitmap(part, filled=filled)
                freed.callback(mtmd.mtmd_bitmap_free, bitmap)
                mtmd.mtmd_bitmap_set_id(bitmap, str(n_media).encode())
                n_media += 1
                chunks.append(mtmd.mtmd_input_part(None, bitmap))
            native = mtmd.mtmd_input_chunks_init()
            freed.callback(mtmd.mtmd_input_chunks_free, native)
            list_of_parts = ctypes.POINTER(mtmd.mtmd_input_part) * len(chunks)
            pointers = list_of_parts(*(ctypes.pointer(part) for part in chunks))
            code = mtmd.mtmd_tokenize_from_parts(
                self._context, native, pointers, len(chunks), add_bos
            )
            if code:
                raise BackendFailure(f"the input could not be read: {log.reason(f'code {code}')}")
            n_chunks = mtmd.mtmd_input_chunks_size(native)
            yield [mtmd.mtmd_input_chunks_get(native, i) for i in range(n_chunks)]

    def _bitmap(self, medium: Media, *, filled: bool) -> Any:
        address = ctypes.c_char_p(medium.data)
        if isinstance(medium, SoundSamples):
            samples = None
            if filled:
                samples = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            return self._mtmd.mtmd_bitmap_init_from_audio(medium.n_samples, samples)
        numbers = None
        if filled:
            numbers = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
        return self._mtmd.mtmd_bitmap_init(medium.width, medium.height, numbers)


def _apart_from_sounds(
    parts: Sequence[str | Media],
) -> Iterator[SoundSamples | list[str | Media]]:
    """Each sound, and the other parts before, between and after the sounds."""
    others: list[str | Media] = []
    for part in parts:
        if isinstance(part, SoundSamples):
            yield others
            yield part
            others = []
        else:
            others.append(part)
    yield others


class LlamaCppMediaBackend(LlamaCppBackend):
    def __init__(self, llama: Any, model: Any, context: Any, spec: LoadSpec, *rest: Any) -> None:
        self._projector = projector = Projector(llama, model, spec)
        self._two_dimensional = projector.two_dimensional
        self._projector_bytes = projector.bytes
        super().__init__(llama, model, context, spec, *rest)
        self.capabilities = replace(
            self.capabilities,
            vision=projector.vision,
            audio=projector.audio_rate_hz > 0,
            images_in_one_step=projector.non_causal,
        )
        self.info = replace(
            self.info, vision=projector.vision, audio_rate_hz=projector.audio_rate_hz
        )

    def tokenize_media(
        self, parts: Sequence[str | Media], *, add_bos: bool = False
    ) -> list[list[int] | MediaRun]:
        cut: list[str | Media] = []
        for part in parts:
            if isinstance(part, str):
                cut.extend(self.always_parsed.pieces(part))
            else:
                cut.append(part)
        return self._projector.tokenize_media(cut, add_bos=add_bos)

    def encode_media(self, run: MediaRun) -> NDArray[np.float32]:
        return self._projector.encode_media(run)

    @owner_only
    def step(self, chunks: Sequence[Chunk]) -> LlamaCppStepResult:
        """Decode all chunks with one llama_decode, or a single chunk of media."""
        media = media_of(chunks)
        if media is None:
            return super().step(chunks)
        [chunk] = chunks
        n = len(chunk.tokens)
        outputs = min(chunk.outputs, n)
        self._check_step(n, outputs)
        start = self._ledger.length(chunk.sequence) - media.start
        positions = self._places(chunk.sequence, start, media, n)
        part = media.embeddings[media.start : media.start + n]
        batch = Batch(self._llama, n, width=part.shape[1], tokens=False, dimensions=len(positions))
        batch.add(chunk.sequence, 0, [0] * n, outputs)
        batch.rows[:] = part
        batch.place(positions)
        ahead = self._projector.non_causal and isinstance(media.run.media, ImagePixels)
        self._llama.llama_set_causal_attn(self._context, not ahead)
        try:
            rows = self._run_step(batch, chunks)
        finally:
            self._llama.llama_set_causal_attn(self._context, True)
        if media.run.grid is not None:
            placed = PlacedMedia(start, media.run.n_tokens, media.run.n_positions)
            self._ledger.place(chunk.sequence, placed)
        return rows

    def _places(
        self, sequence: SequenceId, start: int, media: MediaPart, n: int
    ) -> NDArray[np.int32]:
        """Return the positions of the next `n` tokens of a run that starts at token `start`."""
        first = self._ledger.position(sequence, start)
        if media.run.grid is not None:
            grid = first + media.run.grid[:, media.start : media.start + n]
        else:
            begins = first + media.start
            grid = np.arange(begins, begins + n, dtype=np.int32)[None, :]
            if not self._two_dimensional:
                return grid
            grid = np.repeat(grid, 3, axis=0)
        return np.concatenate([grid, np.zeros((1, n), dtype=np.int32)])

    def close(self) -> None:
        self._projector.close()
        super().close()
