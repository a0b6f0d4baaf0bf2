"""Untrusted sound files.

The samples equal those of llama.cpp's own reader. Hostile files are read, or refused with a
reason, within limits.
"""

from __future__ import annotations

import base64
import ctypes
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.conversation import sounds
from models.tiny_audio import write_hearing
from support.pictures import needs_mtmd
from support.sounds import FLAC, MP3, RATE_HZ, needs_miniaudio, wav

pytestmark = needs_miniaudio()
# A silent MPEG-1 frame of 32 kbit/s at 44.1 kHz, and a header that claims 2**31 - 1 frames (more
# than ten thousand hours).
_SILENCE = b"\xff\xfb\x10\xc4" + bytes(100)
_XING = _SILENCE[:36] + b"Xing" + struct.pack(">II", 1, 2**31 - 1) + bytes(60)


def ours(data: bytes) -> NDArray[np.float32]:
    found = sounds.decode(data, RATE_HZ)
    assert not found.problem, found.problem
    return np.frombuffer(base64.b64decode(found.samples), dtype=np.float32)


@needs_mtmd()
def test_the_samples_are_those_of_llama_cpp_s_own_reader(tmp_path: Path) -> None:
    import llama_cpp
    from llama_cpp import mtmd_cpp as mtmd

    model = write_hearing(tmp_path, "gemma4ua")
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    weights: Any = llama_cpp.llama_model_load_from_file(str(model.text).encode(), params)
    options = mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads, options.warmup = False, 1, False
    ears = mtmd.mtmd_init_from_file(str(model.projector).encode(), weights, options)
    for data in (wav(1.0, 1), wav(0.7, 2, 44_100, 2), wav(0.5, 3, 8_000), MP3, FLAC):
        raw = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap: Any = mtmd.mtmd_helper_bitmap_init_from_buf(ears, raw, len(data), False)
        n = mtmd.mtmd_bitmap_get_n_bytes(bitmap)
        theirs = np.frombuffer(
            ctypes.string_at(mtmd.mtmd_bitmap_get_data(bitmap), n), dtype=np.float32
        )
        found = ours(data)
        # llama.cpp's reader queries the length first, and may count a frame more or less.
        both = min(len(theirs), len(found))
        assert abs(len(theirs) - len(found)) <= 1
        # Rounding depends on the compiler: at most one step of 16 bits.
        assert np.abs(found[:both] - theirs[:both]).max() < 4e-5
        mtmd.mtmd_bitmap_free(bitmap)
    mtmd.mtmd_free(ears)
    llama_cpp.llama_model_free(weights)


def test_a_false_length_in_a_sound_file_takes_no_memory() -> None:
    assert len(ours(_XING + _SILENCE * 8)) < RATE_HZ
    endless = wav(0.0)[:40] + struct.pack("<I", 2**32 - 1)
    assert "is empty" in sounds.decode(endless, RATE_HZ).problem
    long = b"".join(_SILENCE for _ in range(sounds.MAX_SECONDS * 40))
    assert "longer than 10 minutes" in sounds.decode(long, RATE_HZ).problem
    assert (
        "at most 25000000"
        in sounds.attached_sound(bytes(25_000_001), "here", in_question=True).problem
    )


def float_wav(*samples: float) -> bytes:
    """Return a WAV of 32-bit floats: these samples, and 0.2 s of silence."""
    body = struct.pack(f"<{len(samples)}f", *samples) + bytes(4 * RATE_HZ // 5)
    form = struct.pack("<HHIIHH", 3, 1, RATE_HZ, 4 * RATE_HZ, 4, 32)
    chunks = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(body))
    return b"RIFF" + struct.pack("<I", len(chunks) + len(body)) + chunks + body


def test_samples_that_no_encoder_can_take_are_refused() -> None:
    assert len(ours(float_wav(0.5, -1.5))) == RATE_HZ // 5 + 2
    for number in (float("nan"), float("inf"), float("-inf"), 1e38, -1e4):
        assert "out of range" in sounds.decode(float_wav(number), RATE_HZ).problem
    # An encoder's library ends the process if the sound has one sample.
    for seconds in (1 / RATE_HZ, 0.01):
        assert "shorter than 0.05" in sounds.decode(wav(seconds), RATE_HZ).problem


def mutated(rng: random.Random) -> bytes:
    """Return a file of one of the formats with bytes changed, cut, duplicated or set to large
    values."""
    data = bytearray(rng.choice((wav(0.2, 1), MP3, FLAC, _XING + _SILENCE * 4)))
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at = rng.randrange(min(64, len(data)) if rng.random() < 0.5 else len(data))
        action = rng.randrange(4)
        if action == 0:
            data[at] = rng.randrange(256)
        elif action == 1:
            data[at : at + 4] = rng.choice((b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4)))
        elif action == 2:
            data[at:at] = data[at : at + rng.randrange(1, 500)]
        else:
            data = data[: max(1, at)]
    return bytes(data)


@pytest.mark.parametrize("n", [8, pytest.param(60, marks=pytest.mark.long)])
def test_damaged_files_are_read_or_refused_with_a_reason(n: int) -> None:
    rng = random.Random(5)
    read = 0
    for _ in range(n):
        found = sounds.decode(mutated(rng), RATE_HZ)
        assert bool(found.samples) != bool(found.problem)
        assert len(found.samples) <= sounds.MAX_SECONDS * RATE_HZ * 6
        read += bool(found.samples)
    assert 0 < read < n
