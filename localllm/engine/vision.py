"""Prepares prompts with images: decodes the files, lays them out as tokens, and encodes them into
embeddings.

Decoding and encoding run outside the engine's thread. An image whose KV is cached is never encoded.
Other images are encoded once, while the text before them is read. Their embeddings are kept in
memory and on disk, in case the KV is evicted.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm import paths
from localllm.engine.cache.eviction import StoredFile, files_to_remove
from localllm.engine.request import RunningRequest
from localllm.engine.scheduler import Grant
from localllm.engine.tokens import Placed, laid_out, split
from localllm_backends.contract import Backend, BackendFailure, ImagePixels, ImageRun
from localllm_backends.control_text import control_texts

Embeddings = NDArray[np.float32]
# Pixels are kept only for the encoder, which runs soon. Later the file is recognised by its size
# and hash.
_PIXELS_BYTES = 128 * 10**6
_EMBEDDINGS_BYTES = 256 * 10**6
_FOLDER_BYTES = 2 * 10**9
MOST_IMAGES = 64


class ImageReader:
    """Turns prompts of text and image files into tokens. Must be used by one thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pixels: OrderedDict[str, ImagePixels] = OrderedDict()

    def read(
        self, prompt: str, images: dict[str, str], *, add_bos: bool, salt: str = ""
    ) -> tuple[list[int], tuple[Placed, ...]]:
        """The prompt's tokens and the positions of its images. `images`: files in base64, by mark.
        Raises BackendFailure."""
        parts = split(prompt, images)
        if sum(image for _, image in parts) > MOST_IMAGES:
            raise ImageError(f"a prompt may have {MOST_IMAGES} images at most")
        controls = control_texts(self._backend.info.control_texts)
        made: list[str | ImagePixels] = []
        for part, image in parts:
            made += [self._picture(images[part])] if image else controls.runs(part)
        return laid_out(self._backend.tokenize_images(made, add_bos=add_bos), salt)

    def _picture(self, file: str) -> ImagePixels:
        name = hashlib.sha256(file.encode(errors="surrogatepass")).hexdigest()
        picture = self._pixels.pop(name, None) or decode(from_base64(file))
        self._pixels[name] = picture
        while (
            len(self._pixels) > 1
            and sum(len(p.data) for p in self._pixels.values()) > _PIXELS_BYTES
        ):
            self._pixels.popitem(last=False)
        return picture


class Encoder:
    """Encodes requested images, one at a time, in its own thread. Sets `news` after each.

    `folder` stores the embeddings (None: memory only). Methods must be called from the engine's
    thread.
    """

    def __init__(self, backend: Backend, news: threading.Event, folder: Path | None) -> None:
        self.backend = backend
        self._news = news
        self._folder = folder
        self.encodes = self.from_disk = 0
        self.encode_s = 0.0
        self._thread = ThreadPoolExecutor(1, "images")
        # By the image's key, most recently used last.
        self._found: OrderedDict[bytes, Future[Embeddings]] = OrderedDict()

    def want(self, run: ImageRun) -> None:
        """Start encoding an image, unless that was started already."""
        if run.key not in self._found:
            encoding = self._found[run.key] = self._thread.submit(self._encode, run)
            encoding.add_done_callback(self._encoded)

    def _encoded(self, _encoding: Future[Any]) -> None:
        self._news.set()

    def embeddings(self, run: ImageRun) -> Embeddings | None:
        """The embeddings of an image; None while it is being encoded. Raises BackendFailure if
        encoding failed."""
        self.want(run)
        future = self._found[run.key]
        if not future.done():
            return None
        error = future.exception()
        if error is not None:
            # The next request tries again.
            del self._found[run.key]
            raise BackendFailure(str(error) or type(error).__name__)
        self._found.move_to_end(run.key)
        self._forget_the_oldest()
        return future.result()

    def snapshot(self) -> dict[str, float | int | str]:
        return {
            "image_encodes": self.encodes,
            "image_encode_s": self.encode_s,
            "images_from_disk": self.from_disk,
            "image_cache_bytes": sum(self._held_bytes().values()),
        }

    def close(self) -> None:
        """Wait for the current encode, and stop."""
        self._thread.shutdown(cancel_futures=True)

    def _held_bytes(self) -> dict[bytes, int]:
        """Bytes of the embeddings in memory, least recently used first."""
        done = [(key, f) for key, f in self._found.items() if f.done() and not f.exception()]
        return {key: future.result().nbytes for key, future in done}

    def _forget_the_oldest(self) -> None:
        held_bytes = self._held_bytes()
        excess_bytes = sum(held_bytes.values()) - _EMBEDDINGS_BYTES
        for key, n_bytes in list(held_bytes.items())[:-1]:
            if excess_bytes <= 0:
                return
            del self._found[key]
            excess_bytes -= n_bytes

    # --- the thread -------------------------------------------------------------------------------

    def _encode(self, run: ImageRun) -> Embeddings:
        found = self._read_file(run)
        if found is not None:
            self.from_disk += 1
            return found
        started = time.monotonic()
        found = self.backend.encode_image(run)
        self.encodes += 1
        self.encode_s += time.monotonic() - started
        self._write_file(run, found)
        return found

    def _read_file(self, run: ImageRun) -> Embeddings | None:
        if self._folder is None:
            return None
        file = self._folder / f"{run.key.hex()}.image"
        try:
            data = file.read_bytes()
            file.touch()
        except OSError:
            return None
        body = data[:-32]
        digest = data[-32:]
        if hashlib.sha256(body).digest() != digest or len(body) % (4 * run.n_tokens):
            file.unlink(missing_ok=True)
            return None
        return np.frombuffer(body, dtype=np.float32).reshape(run.n_tokens, -1)

    def _write_file(self, run: ImageRun, found: Embeddings) -> None:
        if self._folder is None:
            return
        file = self._folder / f"{run.key.hex()}.image"
        body = np.ascontiguousarray(found, dtype=np.float32).tobytes()
        try:
            paths.private_dir(self._folder)
            part = file.with_suffix(".part")
            part.write_bytes(body + hashlib.sha256(body).digest())
            part.replace(file)
            self._make_room()
        except OSError:  # a full or read-only disk: the image is encoded again next time
            pass

    def _make_room(self) -> None:
        """Delete the least recently used files if the folder is too large."""
        assert self._folder is not None
        files = [
            StoredFile(f.stat().st_mtime_ns, f.stat().st_size, f)
            for f in self._folder.glob("*.image")
        ]
        excess_bytes = sum(file.size_bytes for file in files) - _FOLDER_BYTES
        for file in files_to_remove(files, excess_bytes, time.time_ns())[0]:
            file.path.unlink(missing_ok=True)


FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_BYTES = 20 * 10**6
# 40 megapixels take 120 MB decoded, and the same again while Pillow rotates them.
MOST_PIXELS = 40 * 10**6
MOST_SIDE = 16_384
# A smaller picture is empty, and projectors divide by its sides.
_LEAST_SIDE = 1


class ImageError(BackendFailure):
    """The image can't be read; the message tells its sender why."""


def from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise ImageError("the image is not valid base64") from e


def decode(data: bytes) -> ImagePixels:
    """The first frame, rotated by its EXIF orientation, with transparent parts on white. Raises
    ImageError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as e:
        raise ImageError(
            "images can't be decoded here: Pillow is not installed (`pip install pillow`)"
        ) from e
    if len(data) > MOST_BYTES:
        raise ImageError(f"the image has {len(data)} bytes, {MOST_BYTES} at most are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Only these decoders are tried, so no other format's code reads the bytes.
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                _check_size(*opened.size)
                return _pixels(opened)
    except ImageError:
        raise
    except UnidentifiedImageError as e:
        raise ImageError(
            "this is no image that can be read: PNG, JPEG, WebP and GIF are (SVG, PDF, AVIF and "
            "HEIC are not)"
        ) from e
    except Image.DecompressionBombError as e:
        raise ImageError(f"the image is too large: {MOST_PIXELS} pixels at most are read") from e
    except MemoryError as e:
        raise ImageError("there is not enough memory for this image") from e
    except Exception as e:  # Pillow's decoders raise any exception for damaged files
        raise ImageError(f"the image is damaged: {type(e).__name__}: {str(e)[:120]}") from e


def _check_size(width: int, height: int) -> None:
    if width < _LEAST_SIDE or height < _LEAST_SIDE:
        raise ImageError("the image is empty")
    if width > MOST_SIDE or height > MOST_SIDE or width * height > MOST_PIXELS:
        raise ImageError(
            f"the image has {width} × {height} pixels; {MOST_PIXELS // 10**6} million and "
            f"{MOST_SIDE} a side are the most"
        )


def _pixels(opened: Any) -> ImagePixels:
    from PIL import Image, ImageOps

    opened.seek(0)
    opened.load()
    picture = ImageOps.exif_transpose(opened)
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        # 16 bits per channel: Pillow's own conversion would clip values above 255.
        picture = picture.convert("I").point(lambda value: value / 257).convert("L")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        ground = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(ground, picture)
    picture = picture.convert("RGB")
    data = picture.tobytes()
    key = hashlib.blake2b(data, digest_size=16, key=b"%d %d" % picture.size)
    return ImagePixels(picture.width, picture.height, data, key.digest())


# This many images of a prompt are encoded ahead, including the one that is due.
_AHEAD = 2


@dataclass
class ImageSteps:
    """Plans the steps that read images. Each image gets its own steps, because a batch has either
    tokens or embeddings.

    - `indivisible`: the tokens of an image must be read in one step.
    - `waiting`: a request could continue after an image is encoded.
    - `failed`: requests whose image could not be encoded, and the reasons.
    - `chosen`: the embeddings of the image that was planned last.
    """

    encoder: Encoder
    indivisible: bool
    waiting: bool = False
    failed: list[tuple[RunningRequest, str]] = field(default_factory=list)
    chosen: Embeddings | None = None
    _last: bool = False

    def unreadable(self, images: Sequence[Placed], n_batch: int) -> str:
        """The reason why the images can't be read; "" if they can."""
        largest = max((i.run.n_tokens for i in images), default=0)
        if self.indivisible and largest > n_batch:
            return (
                f"an image comes to {largest} tokens that this model must read at once; {n_batch} "
                "are the most here"
            )
        return ""

    def _embeddings(self, job: RunningRequest) -> Embeddings | None:
        """The embeddings of the image that the request reads next. None if it reads text, or if
        they are not ready or failed."""
        if job.image is None:
            return None
        try:
            found = self.encoder.embeddings(job.image.run)
        except BackendFailure as e:
            self.failed.append((job, str(e)))
            return None
        self.waiting = self.waiting or found is None
        return found

    def plan(self, ready: Sequence[RunningRequest], most: int) -> Grant | None:
        """The image to read in this step, at most `most` of its tokens; None if text is read."""
        due: dict[str, tuple[RunningRequest, Embeddings]] = {}
        self.waiting = False
        self.failed = []
        for job in ready:
            if not job.prefilling or not job.images:
                continue
            for placed in [i for i in job.images if i.stop > job.n_kv][:_AHEAD]:
                self.encoder.want(placed.run)
            found = self._embeddings(job)
            if found is not None:
                due[job.id] = job, found
        others = any(not (job.prefilling and job.image) for job in ready)
        self._last = bool(due) and not (self._last and others)
        if not self._last:
            return None
        job, self.chosen = min(due.values(), key=lambda found: found[0].arrived_s)
        assert job.image is not None
        left = job.image.stop - job.n_kv
        return Grant(job.id, left if self.indivisible else min(left, most), prefill=True)


def image_steps(backend: Backend, news: threading.Event, kept: str | None) -> ImageSteps | None:
    """The image planner for this backend; None without vision. Embeddings are stored under `kept`
    (None: in memory only)."""
    folder = Path(kept) / "images" if kept is not None else None
    able = backend.capabilities
    if able.vision:
        return ImageSteps(Encoder(backend, news, folder), able.whole_images)
    return None
