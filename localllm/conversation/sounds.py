"""Sounds in messages: each is extracted, a mark replaces it in the text, and a child process decodes
it.

Needs the extra `audio`: miniaudio, the decoder that llama.cpp contains, too. Its native parsers read
untrusted bytes, so a `LimitedChild` runs this module. A request has the file in base64 and the
sample rate that the model needs. The response is the samples in base64 (float32, one channel), or
the reason why the file can't be read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import re
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from localllm.limited_child import ChildError, ChildLimits, LimitedChild, RefusedError, serve

KINDS = ("input_audio", "audio_url")
MAX_BYTES = 25 * 10**6
MAX_SECONDS = 600
MAX_CHANNELS = 8
# Encoders need a few frames; llama.cpp ends the process for a sound of one sample.
_MIN_SECONDS = 0.05
# Samples are between -1 and 1. Files of floats may go beyond, but not far.
_MAX_SAMPLE = 100.0
# Telephones and studios.
_MIN_RATE_HZ = 4_000
_MAX_RATE_HZ = 192_000
_LIMITS = ChildLimits(cpu_s=20.0, memory_bytes=256 * 2**20, nice=5)
# Longer than the child's CPU limit, because other processes may delay it.
_TIME_LIMIT_S = 3 * _LIMITS.cpu_s
# Frames that are decoded at once: a multiple of three, so that each piece has its own base64.
_CHUNK_FRAMES = 3 * 2**14
FORMATS = "WAV, MP3 or FLAC"
MISSING = "audio support is not installed: pip install 'localllm[audio]'"
NOTE = "[audio omitted: this model does not support audio]"
# How the engine takes a sound: this prefix, then the samples in base64.
SAMPLES = "data:audio/pcm;base64,"
_DATA = "data:"
# The beginning of a frame of layer III. Text in UTF-16 also begins with 0xff.
_MP3_FRAME = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]")


@dataclass(frozen=True, slots=True)
class AttachedSound:
    """A sound in a message, whose text contains `mark` in its place.

    - `data`: the file, or b"" if there is a `problem`.
    - `in_question`: the sound belongs to the turn to be answered.
    - `samples`: the decoded sound as the engine takes it, "" until it is decoded.
    """

    mark: str
    data: bytes
    where: str
    in_question: bool
    problem: str = ""
    samples: str = ""


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples in base64 (float32, one channel), or the problem if the file can't be read."""

    samples: str = ""
    problem: str = ""


def attached(part: Mapping[str, Any], where: str, *, in_question: bool) -> AttachedSound:
    """The sound in a part of a message: `input_audio` (OpenAI) or `audio_url` (vLLM)."""
    file: Any = part.get("input_audio", part.get("audio_url"))
    if isinstance(file, Mapping):
        file = file.get("data", file.get("url"))
    data, problem = _decode_base64(file)
    return attached_sound(data, where, in_question=in_question, problem=problem)


def attached_if_sound(file: str, where: str, *, in_question: bool) -> AttachedSound | None:
    """The sound in a file whose kind the client did not name; None if its first bytes are those of
    something else. Ollama's clients send sounds in the field for images."""
    try:
        first_bytes = base64.b64decode(file[:16], validate=True)
    except (binascii.Error, ValueError):
        return None
    if not kind_of(first_bytes):
        return None
    data, problem = _decode_base64(file)
    return attached_sound(data, where, in_question=in_question, problem=problem)


def attached_sound(
    data: bytes, where: str, *, in_question: bool, problem: str = ""
) -> AttachedSound:
    """The sound in the bytes of a file."""
    if not problem and len(data) > MAX_BYTES:
        problem = f"the sound has {len(data)} bytes; at most {MAX_BYTES} are allowed"
        data = b""
    name = hashlib.sha256(data or where.encode()).hexdigest()
    return AttachedSound(f"\ue5c8sound {name[:40]}\uf2a9", data, where, in_question, problem)


def _decode_base64(encoded: Any) -> tuple[bytes, str]:
    """(the file, or the reason why it is missing)."""
    if not isinstance(encoded, str) or not encoded:
        return b"", "the sound is missing: send it in base64"
    if encoded[: len(_DATA)].lower() == _DATA:
        head, _, encoded = encoded.partition(",")
        if not head.lower().endswith(";base64"):
            return b"", "a sound's data URL must be in base64"
    elif "://" in encoded[:64]:
        return b"", "this server does not download sounds: send the file in base64"
    try:
        return base64.b64decode(encoded, validate=True), ""
    except (binascii.Error, ValueError):
        return b"", "the sound is not valid base64"


def installed() -> bool:
    """Whether the extra `audio` is there: the decoder, and the parser of forms."""
    return all(importlib.util.find_spec(name) for name in ("miniaudio", "python_multipart"))


def sample_bytes(samples: str) -> int:
    """The bytes of samples as the engine takes them; 0 for anything else."""
    if not samples.startswith(SAMPLES):
        return 0
    return (len(samples) - len(SAMPLES)) // 4 * 3 - samples[-2:].count("=")


def length_s(data: bytes) -> float | None:
    """The length of a sound file in seconds, as it claims; None if it can't be read."""
    if not installed():
        return None
    sound = decode(data, 0)
    return float(sound.samples) if sound.samples else None


def decode(data: bytes, rate_hz: int, *, time_limit_s: float = _TIME_LIMIT_S) -> Sound:
    """Decode the file `data`; blocks until the child has answered.

    With a `rate_hz` of 0, the answer is its claimed length in seconds instead of its samples.
    """
    child = LimitedChild("localllm.conversation.sounds", _LIMITS)
    deadline_s = time.monotonic() + time_limit_s

    def has_time() -> bool:
        return time.monotonic() < deadline_s

    try:
        samples = child.ask([base64.b64encode(data).decode(), rate_hz], wanted=has_time)
    except RefusedError as e:
        return Sound(problem=e.message)
    except ChildError as e:
        if not has_time():
            return Sound(problem=f"the sound could not be read within {time_limit_s:.0f} seconds")
        return Sound(problem=f"the sound is damaged, or too large to read: {e.message}")
    finally:
        child.close()
    return Sound(samples)


# --- the child ------------------------------------------------------------------------------------


def kind_of(data: bytes) -> str:
    """Return wav, mp3 or flac, or "" for any other file."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"fLaC":
        return "flac"
    if data[:3] == b"ID3" or _MP3_FRAME.match(data):
        return "mp3"
    return ""


def samples_of(data: bytes, rate_hz: int) -> str:
    """Decode a file to float32 samples in base64, one channel, at `rate_hz` (0: its length).

    Raises ValueError with the reason if that is impossible.
    """
    import miniaudio

    kind = kind_of(data)
    if not kind:
        raise ValueError(f"the sound's format is not supported: send {FORMATS}")
    read_info = {
        "wav": miniaudio.wav_get_info,
        "mp3": miniaudio.mp3_get_info,
        "flac": miniaudio.flac_get_info,
    }
    try:
        info = read_info[kind](data)
        _check_format(info.nchannels, info.sample_rate)
        if not rate_hz:
            return str(info.duration)
        chunks = miniaudio.stream_memory(
            data,
            output_format=miniaudio.SampleFormat.FLOAT32,
            nchannels=1,
            sample_rate=rate_hz,
            frames_to_read=_CHUNK_FRAMES,
        )
        return _encode_samples(chunks, rate_hz)
    except miniaudio.MiniaudioError as e:
        raise ValueError(f"the sound is damaged: it is no complete {kind.upper()} file") from e


def _check_format(n_channels: int, rate_hz: int) -> None:
    if not 1 <= n_channels <= MAX_CHANNELS:
        raise ValueError(f"the sound has {n_channels} channels; the limit is {MAX_CHANNELS}")
    if not _MIN_RATE_HZ <= rate_hz <= _MAX_RATE_HZ:
        raise ValueError(
            f"the sound has {rate_hz} samples per second, "
            f"but only {_MIN_RATE_HZ} to {_MAX_RATE_HZ} are allowed"
        )


def _encode_samples(chunks: Any, rate_hz: int) -> str:
    """Headers may claim any length, so only decoded samples are counted."""
    texts = []
    pending = array("f")
    n_samples = 0
    for chunk in chunks:
        # NaN passes comparisons in either direction, but not the sum.
        if not (min(chunk) > -_MAX_SAMPLE and max(chunk) < _MAX_SAMPLE and isfinite(sum(chunk))):
            raise ValueError("the sound has samples that are out of range")
        n_samples += len(chunk)
        if n_samples > MAX_SECONDS * rate_hz:
            raise ValueError(f"the sound is longer than {MAX_SECONDS // 60} minutes, the limit")
        pending.extend(chunk)
        n_whole = len(pending) // 3 * 3
        texts.append(base64.b64encode(pending[:n_whole].tobytes()).decode())
        pending = pending[n_whole:]
    texts.append(base64.b64encode(pending.tobytes()).decode())
    if n_samples < _MIN_SECONDS * rate_hz:
        raise ValueError(f"the sound is empty or shorter than {_MIN_SECONDS} s")
    return "".join(texts)


def _answer(question: list[Any]) -> str:
    encoded, rate_hz = question
    return samples_of(base64.b64decode(encoded), rate_hz)


def _answerer(setup: object) -> Callable[[list[Any]], str]:
    import miniaudio  # noqa: F401 - loaded before the process is forked

    return _answer


if __name__ == "__main__":
    serve(_answerer)
