"""Pictures for tests, and marks that skip a test if this build can't read them."""

from __future__ import annotations

import hashlib
import importlib.util
import io

import numpy as np
import pytest

from localllm_backends.contract import ImagePixels


def needs_mtmd() -> pytest.MarkDecorator:
    """Skip the test visibly if llama-cpp-python was built without mtmd."""
    from localllm_backends.llamacpp import backend_type

    missing = backend_type.reads_images()
    return pytest.mark.skipif(missing is not None, reason=missing or "")


def needs_pillow() -> pytest.MarkDecorator:
    """Skip the test visibly if Pillow is not installed (a checkout that was not set up again)."""
    found = importlib.util.find_spec("PIL") is not None
    return pytest.mark.skipif(not found, reason="Pillow is not installed")


def needs_mlx_vlm() -> pytest.MarkDecorator:
    """Skip the test visibly if MLX or mlx-vlm is not installed."""
    from localllm_backends.mlx import backend_type

    missing = backend_type.available()
    if missing is None and importlib.util.find_spec("mlx_vlm") is None:
        missing = "mlx-vlm is not installed"
    return pytest.mark.skipif(missing is not None, reason=str(missing))


def pixels(width: int, height: int, seed: int) -> ImagePixels:
    """Return random pixels in decoded form."""
    data = (
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()
    )
    return ImagePixels(width, height, data, hashlib.blake2b(data, digest_size=16).digest())


def png(width: int, height: int, seed: int, kind: str = "PNG") -> bytes:
    """Return an image file of random pixels."""
    from PIL import Image

    picture = pixels(width, height, seed)
    made = io.BytesIO()
    Image.frombytes("RGB", (width, height), picture.data).save(made, kind)
    return made.getvalue()
