"""Untrusted image files are decoded, or refused with the reason. They never cause a crash, a hang
or gigabytes of memory."""

from __future__ import annotations

import io
import random
import resource
import time

import pytest

from localllm.engine.image_files import MAX_PIXELS, ImageError, decode
from support.pictures import needs_pillow, png

pytestmark = needs_pillow()
SEEDS = [("PNG", 97, 41), ("JPEG", 120, 80), ("WEBP", 64, 200), ("GIF", 50, 60)]


def mutated(rng: random.Random) -> bytes:
    """Return a file of one of the formats with some bytes changed, removed, duplicated or taken
    from another file."""
    kind, width, height = rng.choice(SEEDS)
    data = bytearray(png(width, height, rng.randrange(8), kind))
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at, action = rng.randrange(len(data)), rng.randrange(6)
        # The sizes are in the headers.
        at = at if rng.random() < 0.5 else rng.randrange(min(64, len(data)))
        if action == 0:
            data[at] = rng.randrange(256)
        elif action == 1:
            data[at : at + 4] = rng.choice(
                (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\0\0\x75\x30")
            )
        elif action == 2:
            del data[at : at + rng.randrange(1, 200)]
        elif action == 3:
            data[at:at] = data[at : at + rng.randrange(1, 500)]
        elif action == 4:
            data = data[: max(1, at)]
        else:
            other = png(30, 30, 1, rng.choice(SEEDS)[0])
            data[at : at + 50] = other[: rng.randrange(1, 80)]
        if not data:
            return b""
    return bytes(data)


def fuzz(n: int, seed: int) -> tuple[int, int]:
    """Decode `n` mutated files and return (decoded, refused). Each file takes less than 10 s of CPU
    time."""
    rng = random.Random(seed)
    read = refused = 0
    for _ in range(n):
        data = mutated(rng)
        started = time.process_time()
        try:
            picture = decode(data)
        except ImageError:
            refused += 1
        else:
            assert len(picture.data) == 3 * picture.width * picture.height <= 3 * MAX_PIXELS
            read += 1
        assert time.process_time() - started < 10
    return read, refused


def test_mutated_files_are_read_or_refused() -> None:
    read, refused = fuzz(150, 1)
    assert read > 10
    assert refused > 10


@pytest.mark.long
def test_two_thousand_mutated_files_take_bounded_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read, refused = fuzz(2000, 2)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{read} read, {refused} refused, {grown_mb:.0f} MB more at the peak")
    assert grown_mb < 600


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few kilobytes with that many black pixels."""
    from PIL import Image

    made = io.BytesIO()
    Image.new("1", (width, height)).save(made, "PNG")
    return made.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not supported"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='x'/>", "SVG"),
        (b"<?xml version='1.0'?><svg/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"GIF89a", "damaged|not supported"),
        (b"\0" * 21_000_000, "bytes"),
        (b"II*\0" + b"\0" * 200, "not supported"),
        (b"BM" + b"\0" * 200, "not supported"),
    ],
)
def test_a_file_that_is_no_image_is_refused_with_its_kind(data: bytes, said: str) -> None:
    with pytest.raises(ImageError, match=said):
        decode(data)


def test_decompression_bombs_are_refused_before_memory_is_allocated() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    files = [bomb(9000, 9000), bomb(20_000, 10)]
    for data in files:
        with pytest.raises(ImageError, match=r"pixels|large"):
            decode(data)
    assert decode(bomb(1, 1)).width == 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 200


def test_the_same_pixels_in_another_file_have_the_same_key() -> None:
    from PIL import Image

    made = io.BytesIO()
    picture = Image.open(io.BytesIO(png(40, 30, 1)))
    picture.save(made, "WEBP", lossless=True)
    assert decode(made.getvalue()).key == decode(png(40, 30, 1)).key != decode(png(40, 30, 2)).key


def test_sixteen_bit_images_and_animations_are_converted_as_viewers_show_them() -> None:
    from PIL import Image

    made = io.BytesIO()
    Image.new("I;16", (8, 8), 65535).save(made, "PNG")
    assert set(decode(made.getvalue()).data) == {255}
    made = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "blue")]
    frames[0].save(made, "GIF", save_all=True, append_images=frames[1:])
    assert decode(made.getvalue()).data[:3] == b"\xff\0\0"
