"""Sounds for tests: samples, and wav, mp3 and flac files."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import wave
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm_backends.contract import SoundSamples

RATE_HZ = 16_000


def tone(seconds: float, seed: int = 0, rate_hz: int = RATE_HZ) -> NDArray[np.float32]:
    """Return three tones with noise, between -1 and 1."""
    rng = np.random.default_rng(seed)
    at_s = np.arange(int(seconds * rate_hz)) / rate_hz
    made = sum(np.sin(2 * np.pi * f * at_s) for f in rng.uniform(100, 3000, 3)) / 4
    return (made + rng.normal(0, 0.02, len(at_s))).astype(np.float32)


def samples(seconds: float, seed: int = 0) -> SoundSamples:
    """Return a sound in the engine's input form."""
    data = tone(seconds, seed).tobytes()
    return SoundSamples(data, hashlib.blake2b(data, digest_size=16).digest())


def wav(seconds: float, seed: int = 0, rate_hz: int = RATE_HZ, channels: int = 1) -> bytes:
    """Return a wav file with 16 bits per sample."""
    made = io.BytesIO()
    numbers = (tone(seconds, seed, rate_hz) * 32767).astype("<i2")
    with wave.open(made, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(np.repeat(numbers, channels).tobytes())
    return made.getvalue()


def needs_miniaudio() -> pytest.MarkDecorator:
    """Skip the test visibly if the extra `audio` is not installed."""
    found = importlib.util.find_spec("miniaudio") is not None
    return pytest.mark.skipif(not found, reason="miniaudio is not installed")


# A second at 24 kHz, encoded by LAME, and a tenth of a second at 22.05 kHz in stereo, by
# libsndfile.
MP3 = Path(__file__).with_name("tone.mp3").read_bytes()
FLAC = Path(__file__).with_name("tone.flac").read_bytes()
