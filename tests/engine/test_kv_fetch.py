"""The thread that receives KV yields the processor to decoding streams, and only to them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from localllm.engine.cache.identity import identity_of
from localllm.engine.cache.kv_file import KvEntry
from localllm.engine.cache.tree import as_tokens
from localllm.engine.transfer.fetching import KvFetch, WantedKv
from localllm.engine.transfer.frames import DONE, json_frame
from localllm.engine.transfer.peer import KvAnswer, KvPeer
from localllm.engine.transfer.wire import BLOCK_TOKENS, block_frame
from support.scripted_backend import ScriptedBackend

PROMPT = as_tokens([5 + i % 200 for i in range(2 * BLOCK_TOKENS + 1)])
PIECE_BYTES = 4096
IDENTITY = identity_of(ScriptedBackend())


@dataclass
class Sending(KvPeer):
    """A server that sends two blocks in small pieces. `ended` is set after the last piece was
    read."""

    ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def open_response(self, body: dict[str, Any], silence_s: float = 0.0) -> Iterator[KvAnswer]:
        yield KvAnswer(iter(pieces()), None)  # type: ignore[arg-type]
        self.ended.set()


def pieces() -> list[bytes]:
    data = np.arange(20_000, dtype=np.uint8).tobytes()
    frames = b""
    for start in (0, BLOCK_TOKENS):
        entry = KvEntry(IDENTITY.name, PROMPT[: start + BLOCK_TOKENS], start)
        frames += b"".join(block_frame(entry, data))
    frames += json_frame(DONE, {})
    return [frames[at : at + PIECE_BYTES] for at in range(0, len(frames), PIECE_BYTES)]


@pytest.mark.parametrize("yields", [True, False])
def test_a_transfer_rests_after_each_piece_while_streams_decode(
    yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    peer = Sending("http://there:1", None, "m", {}, print)
    fetch = KvFetch(
        peer, IDENTITY, WantedKv(PROMPT, 0, ""), 100.0, threading.Event(), yields=yields
    )
    monkeypatch.setattr(fetch, "pause", rests.append)
    fetch.begin()
    assert peer.ended.wait(60)
    assert [fetch.take().stop for _ in range(2)] == [BLOCK_TOKENS, 2 * BLOCK_TOKENS]
    assert fetch.done
    assert fetch.error is None
    assert len(rests) == (len(pieces()) if yields else 0)
    assert all(0 <= seconds <= 0.02 for seconds in rests)


def test_a_closed_transfer_does_not_rest() -> None:
    peer = Sending("http://there:1", None, "m", {}, print)
    fetch = KvFetch(peer, IDENTITY, WantedKv(PROMPT, 0, ""), 100.0, threading.Event(), yields=True)
    fetch.close()
    fetch.pause(3600.0)
