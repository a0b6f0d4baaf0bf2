"""Pictures for tests, and what skips a test where this build of llama.cpp reads none."""

from __future__ import annotations

import hashlib
import importlib.util
import io

import numpy as np
import pytest

from localllm_backends.contract import ImagePixels


def needs_mtmd() -> pytest.MarkDecorator:
    """Skips, visibly, where llama-cpp-python was built without mtmd."""
    from localllm_backends.llamacpp import backend_type

    missing = backend_type.reads_images()
    return pytest.mark.skipif(missing is not None, reason=missing or "")


def needs_pillow() -> pytest.MarkDecorator:
    """Skips, visibly, where Pillow is not installed (a checkout that was not set up again)."""
    found = importlib.util.find_spec("PIL") is not None
    return pytest.mark.skipif(not found, reason="Pillow is not installed")


def needs_mlx_vlm() -> pytest.MarkDecorator:
    """Skips, visibly, where MLX or mlx-vlm is not installed."""
    from localllm_backends.mlx import backend_type

    missing = backend_type.available()
    if missing is None and importlib.util.find_spec("mlx_vlm") is None:
        missing = "mlx-vlm is not installed"
    return pytest.mark.skipif(missing is not None, reason=str(missing))


def pixels(width: int, height: int, seed: int) -> ImagePixels:
    """Random pixels, as they are when decoded."""
    data = (
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()
    )
    return ImagePixels(width, height, data, hashlib.blake2b(data, digest_size=16).digest())


def png(width: int, height: int, seed: int, kind: str = "PNG") -> bytes:
    """A file of random pixels."""
    from PIL import Image

    picture = pixels(width, height, seed)
    made = io.BytesIO()
    Image.frombytes("RGB", (width, height), picture.data).save(made, kind)
    return made.getvalue()
