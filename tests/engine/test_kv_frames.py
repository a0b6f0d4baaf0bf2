"""Frames of a KV transfer: they may arrive in any pieces, their size is limited, and a block is
used only if its checksum matches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from localllm.engine.cache.kv_file import KvEntry
from localllm.engine.transfer.errors import BadFrameError
from localllm.engine.transfer.frames import DONE, FRAME, HEAD, json_frame, pads_frame
from localllm.engine.transfer.wire import Frame, FrameReader, block_frame

TOKENS = np.arange(300, dtype=np.int32)
ENTRY = KvEntry("model-f16-f16-parts-x", TOKENS, 256)
DATA = random.Random(1).randbytes(1_200_000)


def sent() -> bytes:
    parts = [json_frame(HEAD, {"cached": 3}), *block_frame(ENTRY, DATA), pads_frame(0)]
    return b"".join([*parts, json_frame(DONE, {})])


def read(data: bytes, size: int, most: int = 2_000_000) -> list[Frame]:
    reader = FrameReader(most)
    return [f for at in range(0, len(data), size) for f in reader.feed(data[at : at + size])]


@pytest.mark.parametrize("size", [1 << 10, 65_521, 10**7])
def test_frames_are_the_same_in_any_pieces(size: int) -> None:
    head, block, pads, done = read(sent(), size)
    assert head.words() == {"cached": 3}
    assert ENTRY.checked_data(block.body) == DATA
    assert (pads.kind, len(pads.body)) == (b"pads", 0)
    assert done.kind == DONE


def test_a_damaged_byte_anywhere_makes_the_block_unreadable() -> None:
    body = bytearray(b"".join([*block_frame(ENTRY, DATA)][1:]))
    for at in (0, 20, 30, 1000, 600_000, len(body) - 9, len(body) - 1):
        body[at] ^= 4
        assert ENTRY.checked_data(memoryview(body)) is None, at
        body[at] ^= 4
    assert ENTRY.checked_data(memoryview(body)) == DATA


@pytest.mark.parametrize("n", [0, 1, 30, 1300])
def test_a_truncated_body_is_refused(n: int) -> None:
    body = b"".join([*block_frame(ENTRY, DATA)][1:])
    assert ENTRY.checked_data(memoryview(body[:n])) is None


def test_a_block_of_other_tokens_or_another_start_is_not_taken() -> None:
    body = memoryview(b"".join([*block_frame(ENTRY, DATA)][1:]))
    others = TOKENS.copy()
    others[7] += 1
    assert KvEntry(ENTRY.identity, others, 256).checked_data(body) is None
    assert KvEntry(ENTRY.identity, TOKENS, 255).checked_data(body) is None
    assert KvEntry(ENTRY.identity, TOKENS, 256, state=True).checked_data(body) is None


@pytest.mark.parametrize(
    "head",
    [(b"kvbl", 2_000_001), (b"head", 70_000), (b"pads", 2**21), (b"what", 1), (b"kvbl", 2**63)],
)
def test_a_frame_over_its_limit_is_refused_before_memory_is_taken(head: tuple[bytes, int]) -> None:
    with pytest.raises(BadFrameError):
        read(FRAME.pack(*head), 100)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"{"])
def test_a_json_part_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadFrameError):
        Frame(HEAD, memoryview(body)).words()
