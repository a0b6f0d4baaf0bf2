"""Image files from anybody, decoded by Pillow: what is too large is refused before anything is allocated for it.

Runs in the worker process, so that a decoder's crash costs one model's requests an error and never the server.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from typing import Any

from localllm_backends.contract import BackendFailure, ImagePixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_BYTES = 20 * 10**6
# 40 megapixels are 120 MB decoded, and as much again while Pillow turns them.
MOST_PIXELS = 40 * 10**6
MOST_SIDE = 16_384
# Nothing is seen in a picture of fewer pixels, and projectors divide by its sides.
_LEAST_SIDE = 1


class ImageError(BackendFailure):
    """The image can't be read; the message says why, to whoever sent it."""


def from_base64(text: str) -> bytes:
    """The file that was sent as text."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise ImageError("the image is not valid base64") from e


def decode(data: bytes) -> ImagePixels:
    """The first frame, turned as its camera was held, on white where it is transparent. Raises ImageError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as e:
        raise ImageError("images can't be decoded here: Pillow is not installed (`pip install pillow`)") from e
    if len(data) > MOST_BYTES:
        raise ImageError(f"the image has {len(data)} bytes, {MOST_BYTES} at most are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Only these decoders are asked: no other format's code sees the bytes.
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                _check_size(*opened.size)
                return _pixels(opened)
    except ImageError:
        raise
    except UnidentifiedImageError as e:
        raise ImageError(f"this is no image that can be read: {_looks_like(data)}; PNG, JPEG, WebP and GIF are") from e
    except Image.DecompressionBombError as e:
        raise ImageError(f"the image is too large: {MOST_PIXELS} pixels at most are read") from e
    except MemoryError as e:
        raise ImageError("there is not enough memory for this image") from e
    except Exception as e:  # Pillow's decoders raise whatever a damaged file leads them to
        raise ImageError(f"the image is damaged: {type(e).__name__}: {str(e)[:120]}") from e


def _check_size(width: int, height: int) -> None:
    if width < _LEAST_SIDE or height < _LEAST_SIDE:
        raise ImageError("the image is empty")
    if width > MOST_SIDE or height > MOST_SIDE or width * height > MOST_PIXELS:
        raise ImageError(
            f"the image has {width} × {height} pixels; {MOST_PIXELS // 10**6} million and {MOST_SIDE} a side are the most"
        )


def _pixels(opened: Any) -> ImagePixels:
    from PIL import Image, ImageOps

    opened.seek(0)
    opened.load()
    picture = ImageOps.exif_transpose(opened)
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        # 16 bits a channel: Pillow's own conversion cuts off what is above 255.
        picture = picture.convert("I").point(lambda value: value / 257).convert("L")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        ground = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(ground, picture)
    picture = picture.convert("RGB")
    data = picture.tobytes()
    key = hashlib.blake2b(data, digest_size=16, key=b"%d %d" % picture.size)
    return ImagePixels(picture.width, picture.height, data, key.digest())


def _looks_like(data: bytes) -> str:
    start = data[:256].lstrip().lower()
    if start.startswith((b"<svg", b"<?xml")) or b"<svg" in start:
        return "it looks like SVG"
    if start.startswith(b"%pdf"):
        return "it looks like a PDF"
    if data[4:12] in (b"ftypavif", b"ftypheic", b"ftypmif1"):
        return "it looks like AVIF or HEIC"
    return "it is empty" if not data else "its format is unknown"
