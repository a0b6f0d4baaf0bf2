"""Decodes image files that anybody may have sent, within limits on bytes and pixels."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from typing import Any

from localllm_backends.contract import BackendFailure, ImagePixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 20 * 10**6
# 40 megapixels take 120 MB decoded, and the same again while Pillow rotates them.
MAX_PIXELS = 40 * 10**6
MAX_SIDE = 16_384
# A smaller picture is empty, and projectors divide by its sides.
_MIN_SIDE = 1


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
            "images can't be decoded: Pillow is not installed (`pip install pillow`)"
        ) from e
    if len(data) > MAX_BYTES:
        raise ImageError(f"the image has {len(data)} bytes; at most {MAX_BYTES} are allowed")
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
            "the image format is not supported: send PNG, JPEG, WebP or GIF (not "
            "SVG, PDF, AVIF or HEIC)"
        ) from e
    except Image.DecompressionBombError as e:
        raise ImageError(f"the image is too large: at most {MAX_PIXELS} pixels are allowed") from e
    except MemoryError as e:
        raise ImageError("there is not enough memory for this image") from e
    except Exception as e:  # Pillow's decoders raise any exception for damaged files
        raise ImageError(f"the image is damaged: {type(e).__name__}: {str(e)[:120]}") from e


def _check_size(width: int, height: int) -> None:
    if width < _MIN_SIDE or height < _MIN_SIDE:
        raise ImageError("the image is empty")
    if width > MAX_SIDE or height > MAX_SIDE or width * height > MAX_PIXELS:
        raise ImageError(
            f"the image has {width} × {height} pixels; {MAX_PIXELS // 10**6} million and "
            f"{MAX_SIDE} a side are the limits"
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
