"""Prompts with images on their way into the engine: files decoded and laid out as tokens, and encoded into embeddings.

Both happen beside the engine's thread. An image whose KV is known already is never encoded; one that must be, once, while
the text before it is read, and its embeddings are kept, in memory and on disk, for the line that has lost its KV.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm import paths
from localllm.engine.tokens import Placed, laid_out, split
from localllm.engine.vision import image_files
from localllm_backends.contract import Backend, BackendFailure, ImagePixels, ImageRun

Embeddings = NDArray[np.float32]
# Pixels are kept for the encoder, which comes soon: after that a file that is seen again is known by its size and hash.
_PIXELS_BYTES = 128 * 10**6
_EMBEDDINGS_BYTES = 256 * 10**6
_FOLDER_BYTES = 2 * 10**9
MOST_IMAGES = 64


class ImageReader:
    """Makes prompts of text and image files into tokens. Belongs to one thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pixels: OrderedDict[str, ImagePixels] = OrderedDict()

    def read(self, prompt: str, images: dict[str, str], *, add_bos: bool) -> tuple[list[int], tuple[Placed, ...]]:
        """The prompt's tokens, and where its images are. `images`: files in base64, each by its mark. Raises BackendFailure."""
        parts = split(prompt, images)
        if sum(image for _, image in parts) > MOST_IMAGES:
            raise image_files.ImageError(f"a prompt may have {MOST_IMAGES} images at most")
        made = [self._picture(images[part]) if image else part for part, image in parts]
        return laid_out(self._backend.tokenize_images(made, add_bos=add_bos))

    def _picture(self, file: str) -> ImagePixels:
        name = hashlib.sha256(file.encode(errors="surrogatepass")).hexdigest()
        picture = self._pixels.pop(name, None) or image_files.decode(image_files.from_base64(file))
        self._pixels[name] = picture
        while len(self._pixels) > 1 and sum(len(p.data) for p in self._pixels.values()) > _PIXELS_BYTES:
            self._pixels.popitem(last=False)
        return picture


@dataclass
class Encoder:
    """Encodes what the engine asks for, one image at a time, in a thread of its own; `folder` keeps what came of it
    (None: nowhere). Its methods belong to the engine's thread."""

    backend: Backend
    folder: Path | None = None
    encodes: int = 0
    encode_s: float = 0.0
    from_disk: int = 0
    _kept: OrderedDict[bytes, Embeddings] = field(default_factory=OrderedDict)
    _errors: dict[bytes, str] = field(default_factory=dict)
    _wanted: set[bytes] = field(default_factory=set)
    _due: queue.SimpleQueue[ImageRun | None] = field(default_factory=queue.SimpleQueue)
    _news: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    def want(self, run: ImageRun) -> None:
        """Have it encoded soon, unless it is or will be."""
        with self._lock:
            if run.key in self._kept or run.key in self._wanted or run.key in self._errors:
                return
            self._wanted.add(run.key)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="images", daemon=True)
            self._thread.start()
        self._due.put(run)

    def embeddings(self, run: ImageRun) -> Embeddings | None:
        """What the image came to; None while it is being encoded. Raises BackendFailure where it can't be."""
        with self._lock:
            found = self._kept.get(run.key)
            if found is not None:
                self._kept.move_to_end(run.key)
                return found
            error = self._errors.pop(run.key, None)
        if error is not None:
            raise BackendFailure(error)
        self.want(run)
        return None

    def wait(self, seconds: float) -> None:
        """Until something is encoded, or for so long."""
        if self._news.wait(seconds):
            self._news.clear()

    def snapshot(self) -> dict[str, float | int | str]:
        """Counts so far."""
        with self._lock:
            held = sum(e.nbytes for e in self._kept.values())
        return {
            "image_encodes": self.encodes,
            "image_encode_s": self.encode_s,
            "images_from_disk": self.from_disk,
            "image_cache_bytes": held,
        }

    def close(self) -> None:
        """Let the encode that runs come to its end."""
        self._due.put(None)
        if self._thread is not None:
            self._thread.join()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            run = self._due.get()
            if run is None:
                return
            found, error = self._read_file(run), ""
            if found is None:
                started = time.monotonic()
                try:
                    found = self.backend.encode_image(run)
                except Exception as e:  # a thread must not end with somebody waiting
                    error = str(e) or type(e).__name__
                else:
                    self.encodes += 1
                    self.encode_s += time.monotonic() - started
            else:
                self.from_disk += 1
            with self._lock:
                self._wanted.discard(run.key)
                if found is None:
                    self._errors[run.key] = error
                else:
                    self._keep(run.key, found)
            self._news.set()
            if found is not None and not error:
                self._write_file(run, found)

    def _keep(self, key: bytes, found: Embeddings) -> None:
        self._kept[key] = found
        while len(self._kept) > 1 and sum(e.nbytes for e in self._kept.values()) > _EMBEDDINGS_BYTES:
            self._kept.popitem(last=False)

    def _read_file(self, run: ImageRun) -> Embeddings | None:
        if self.folder is None:
            return None
        file = self.folder / f"{run.key.hex()}.image"
        try:
            data = file.read_bytes()
            file.touch()
        except OSError:
            return None
        body, digest = data[:-32], data[-32:]
        if hashlib.sha256(body).digest() != digest or len(body) % (4 * run.n_tokens):
            file.unlink(missing_ok=True)
            return None
        return np.frombuffer(body, dtype=np.float32).reshape(run.n_tokens, -1)

    def _write_file(self, run: ImageRun, found: Embeddings) -> None:
        if self.folder is None:
            return
        file = self.folder / f"{run.key.hex()}.image"
        if file.exists():
            return
        body = np.ascontiguousarray(found, dtype=np.float32).tobytes()
        try:
            paths.private_dir(self.folder)
            part = file.with_suffix(".part")
            part.write_bytes(body + hashlib.sha256(body).digest())
            part.replace(file)
            self._make_room()
        except OSError:  # a full or read-only disk: it is encoded again another time
            pass

    def _make_room(self) -> None:
        """The longest unused files go where there are too many bytes of them."""
        assert self.folder is not None
        files = sorted(self.folder.glob("*.image"), key=lambda f: f.stat().st_mtime)
        held_bytes = sum(f.stat().st_size for f in files)
        for file in files:
            if held_bytes <= _FOLDER_BYTES:
                return
            held_bytes -= file.stat().st_size
            file.unlink(missing_ok=True)
