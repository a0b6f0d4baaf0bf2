"""Prepares prompts with media (images and sounds): lays them out as tokens, and encodes them into
embeddings.

Decoding and encoding run outside the engine's thread. Media whose KV is cached are never encoded.
Others are encoded once, while the text before them is read. Their embeddings are kept in memory and
on disk, in case the KV is evicted.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm import paths
from localllm.engine.cache.eviction import StoredFile, files_to_remove
from localllm.engine.image_files import ImageError, decode, from_base64
from localllm.engine.request import RunningRequest
from localllm.engine.scheduler import Grant
from localllm.engine.tokens import MediaSpan, lay_out_media, split
from localllm_backends.contract import (
    Backend,
    BackendFailure,
    ImagePixels,
    Media,
    MediaRun,
    SoundSamples,
)
from localllm_backends.control_text import control_texts

Embeddings = NDArray[np.float32]
# Pixels and samples are kept only for the encoder, which runs soon. Later the file is recognised by
# its hash.
_DECODED_BYTES = 128 * 10**6
# Largest file of embeddings that is read: those of 16,384 tokens of 16,384 numbers.
_MAX_FILE_BYTES = 1 << 30
_EMBEDDINGS_BYTES = 256 * 10**6
_FOLDER_BYTES = 2 * 10**9
MAX_MEDIA = 64
# An image arrives as a file in base64, a sound as a data: URL of its float32 samples.
_SCHEME = "data:"


class MediaReader:
    """Turns prompts of text, image files and samples into tokens. Must be used by one thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._decoded: OrderedDict[str, Media] = OrderedDict()

    def read(
        self, prompt: str, media: dict[str, str], *, add_bos: bool, salt: str = ""
    ) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """The prompt's tokens and the positions of its media.

        `media`: image files in base64, or samples (conversation/sounds.py), by mark. Raises BackendFailure.
        """
        parts = split(prompt, media)
        if sum(marked for _, marked in parts) > MAX_MEDIA:
            raise ImageError(f"a prompt may have {MAX_MEDIA} images and sounds at most")
        controls = control_texts(self._backend.info.control_texts)
        pieces: list[str | Media] = []
        for part, marked in parts:
            pieces += [self._medium(media[part])] if marked else controls.runs(part)
        return lay_out_media(self._backend.tokenize_media(pieces, add_bos=add_bos), salt)

    def _medium(self, file: str) -> Media:
        name = hashlib.sha256(file.encode(errors="surrogatepass")).hexdigest()
        decoded = self._decoded.pop(name, None) or self._decode(file)
        self._decoded[name] = decoded
        while (
            len(self._decoded) > 1
            and sum(len(m.data) for m in self._decoded.values()) > _DECODED_BYTES
        ):
            self._decoded.popitem(last=False)
        return decoded

    def _decode(self, file: str) -> Media:
        capabilities = self._backend.capabilities
        if file.startswith(_SCHEME):
            if not capabilities.audio:
                raise BackendFailure("this model does not support audio")
            data = from_base64(file.partition(",")[2])
            return SoundSamples(data, hashlib.blake2b(data, digest_size=16).digest())
        if not capabilities.vision:
            raise ImageError("this model does not support images")
        return decode(from_base64(file))


class Encoder:
    """Encodes requested media, one at a time, in its own thread. Sets `wake` after each.

    `folder` stores the embeddings (None: memory only). Methods must be called from the engine's
    thread.
    """

    def __init__(self, backend: Backend, wake: threading.Event, folder: Path | None) -> None:
        self.backend = backend
        self._wake = wake
        self._folder = folder
        self.from_disk = 0
        # By kind: "image" or "sound".
        self.encodes: Counter[str] = Counter()
        self.encode_s: dict[str, float] = {"image": 0.0, "sound": 0.0}
        self._thread = ThreadPoolExecutor(1, "media")
        # By the key of the run, most recently used last.
        self._encodings: OrderedDict[bytes, Future[Embeddings]] = OrderedDict()

    def want(self, run: MediaRun) -> None:
        """Start encoding a run, unless that was started already."""
        if run.key not in self._encodings:
            encoding = self._encodings[run.key] = self._thread.submit(self._encode, run)
            encoding.add_done_callback(self._encoded)

    def _encoded(self, _encoding: Future[Any]) -> None:
        self._wake.set()

    def embeddings(self, run: MediaRun) -> Embeddings | None:
        """The embeddings of a run; None while it is being encoded. Raises BackendFailure if
        encoding failed."""
        self.want(run)
        future = self._encodings[run.key]
        if not future.done():
            return None
        error = future.exception()
        if error is not None:
            # The next request tries again.
            del self._encodings[run.key]
            raise BackendFailure(str(error) or type(error).__name__)
        self._encodings.move_to_end(run.key)
        self._evict_oldest()
        return future.result()

    def snapshot(self) -> dict[str, float | int | str]:
        return {
            "image_encodes": self.encodes["image"],
            "image_encode_s": self.encode_s["image"],
            "sound_encodes": self.encodes["sound"],
            "sound_encode_s": self.encode_s["sound"],
            "media_from_disk": self.from_disk,
            "media_cache_bytes": sum(self._held_bytes().values()),
        }

    def close(self) -> None:
        """Wait for the current encode, and stop."""
        self._thread.shutdown(cancel_futures=True)

    def _held_bytes(self) -> dict[bytes, int]:
        """Bytes of the embeddings in memory, least recently used first."""
        done = [(key, f) for key, f in self._encodings.items() if f.done() and not f.exception()]
        return {key: future.result().nbytes for key, future in done}

    def _evict_oldest(self) -> None:
        held_bytes = self._held_bytes()
        excess_bytes = sum(held_bytes.values()) - _EMBEDDINGS_BYTES
        for key, n_bytes in list(held_bytes.items())[:-1]:
            if excess_bytes <= 0:
                return
            del self._encodings[key]
            excess_bytes -= n_bytes

    # --- the thread -------------------------------------------------------------------------------

    def _encode(self, run: MediaRun) -> Embeddings:
        embeddings = self._read_file(run)
        if embeddings is not None:
            self.from_disk += 1
            return embeddings
        started = time.monotonic()
        embeddings = self.backend.encode_media(run)
        kind = kind_of(run)
        self.encodes[kind] += 1
        self.encode_s[kind] += time.monotonic() - started
        self._write_file(run, embeddings)
        return embeddings

    def _read_file(self, run: MediaRun) -> Embeddings | None:
        if self._folder is None:
            return None
        file = self._folder / f"{run.key.hex()}.image"
        try:
            data = paths.file_bytes(file, _MAX_FILE_BYTES)
            file.touch()
        except OSError:
            return None
        body = data[:-32]
        digest = data[-32:]
        if hashlib.sha256(body).digest() != digest or len(body) % (4 * run.n_tokens):
            file.unlink(missing_ok=True)
            return None
        return np.frombuffer(body, dtype=np.float32).reshape(run.n_tokens, -1)

    def _write_file(self, run: MediaRun, embeddings: Embeddings) -> None:
        if self._folder is None:
            return
        file = self._folder / f"{run.key.hex()}.image"
        body = np.ascontiguousarray(embeddings, dtype=np.float32).tobytes()
        try:
            paths.private_dir(self._folder)
            part = file.with_suffix(".part")
            part.write_bytes(body + hashlib.sha256(body).digest())
            part.replace(file)
            self._make_room()
        except OSError:  # a full or read-only disk: the run is encoded again next time
            pass

    def _make_room(self) -> None:
        """Delete the least recently used files if the folder is too large."""
        assert self._folder is not None
        files = [
            StoredFile(f.stat().st_mtime_ns, f.stat().st_size, f)
            for f in paths.regular_files(self._folder, "*.image")
        ]
        excess_bytes = sum(file.size_bytes for file in files) - _FOLDER_BYTES
        for file in files_to_remove(files, excess_bytes, time.time_ns())[0]:
            file.path.unlink(missing_ok=True)


def kind_of(run: MediaRun) -> str:
    """Return "image" or "sound"."""
    return "sound" if isinstance(run.media, SoundSamples) else "image"


# This many runs of a prompt are encoded ahead, including the one that is due.
_AHEAD = 2


@dataclass
class MediaSteps:
    """Plans the steps that read media. Each run gets its own steps, because a batch has either
    tokens or embeddings.

    - `indivisible_images`: the tokens of an image must be read in one step.
    - `waiting`: a request could continue after a run is encoded.
    - `failed`: requests whose media could not be encoded, and the reasons.
    - `chosen`: the embeddings of the run that was planned last.
    """

    encoder: Encoder
    indivisible_images: bool
    waiting: bool = False
    failed: list[tuple[RunningRequest, str]] = field(default_factory=list)
    chosen: Embeddings | None = None
    _last_was_media: bool = False

    def unreadable(self, media: Sequence[MediaSpan], n_batch: int) -> str:
        """The reason why the media can't be read; "" if they can."""
        largest = max((m.run.n_tokens for m in media if self._indivisible(m.run)), default=0)
        if largest > n_batch:
            return (
                f"an image takes {largest} tokens, which this model must read in one "
                f"step; the limit is {n_batch}"
            )
        return ""

    def _indivisible(self, run: MediaRun) -> bool:
        return self.indivisible_images and isinstance(run.media, ImagePixels)

    def _embeddings(self, job: RunningRequest) -> Embeddings | None:
        """The embeddings of the run that the request reads next. None if it reads text, or if they
        are not ready or failed."""
        if job.medium is None:
            return None
        try:
            embeddings = self.encoder.embeddings(job.medium.run)
        except BackendFailure as e:
            self.failed.append((job, str(e)))
            return None
        self.waiting = self.waiting or embeddings is None
        return embeddings

    def plan(self, ready: Sequence[RunningRequest], max_tokens: int) -> Grant | None:
        """The run to read in this step, at most `max_tokens` of its tokens; None if text is
        read."""
        ready_media: dict[str, tuple[RunningRequest, Embeddings]] = {}
        self.waiting = False
        self.failed = []
        for job in ready:
            if not job.prefilling or not job.media:
                continue
            for span in [m for m in job.media if m.stop > job.n_kv][:_AHEAD]:
                self.encoder.want(span.run)
            found = self._embeddings(job)
            if found is not None:
                ready_media[job.id] = job, found
        other_work = any(not (job.prefilling and job.medium) for job in ready)
        self._last_was_media = bool(ready_media) and not (self._last_was_media and other_work)
        if not self._last_was_media:
            return None
        job, self.chosen = min(ready_media.values(), key=lambda found: found[0].arrived_s)
        assert job.medium is not None
        left = job.medium.stop - job.n_kv
        n_tokens = left if self._indivisible(job.medium.run) else min(left, max_tokens)
        return Grant(job.id, n_tokens, prefill=True)


def media_steps(
    backend: Backend, wake: threading.Event, cache_dir: str | None
) -> MediaSteps | None:
    """The planner of media for this backend; None if it reads only text. Embeddings are stored
    under `cache_dir` (None: in memory only)."""
    folder = Path(cache_dir) / "images" if cache_dir is not None else None
    capabilities = backend.capabilities
    if capabilities.vision or capabilities.audio:
        return MediaSteps(Encoder(backend, wake, folder), capabilities.images_in_one_step)
    return None
