"""Any malformed answer of a hub causes a one-sentence error, within a memory limit."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from library.hub import Hub
from localllm.errors import LocalLLMError
from localllm.library.hub import Patience, list_files
from support.malformed_listings import MOST_BYTES, bomb, listings, mark

REPO = "org/Tiny-GGUF"
FILE = {"rfilename": "Tiny-Q4_K_M.gguf", "size": 5, "blobId": "0" * 40}
COMMIT = "a" * 40
PLACES: dict[str, Any] = {
    "listing": mark(),
    "siblings": {"sha": COMMIT, "siblings": mark()},
    "row": {"sha": COMMIT, "siblings": [FILE, mark()]},
    "sha": {"sha": mark(), "siblings": [FILE]},
    **{
        field: {"sha": COMMIT, "siblings": [{**FILE, field: mark()}]}
        for field in ("rfilename", "size", "blobId", "lfs")
    },
}


@pytest.mark.parametrize(
    ("name", "body"), [*listings(PLACES)], ids=[n for n, _ in listings(PLACES)]
)
def test_a_malformed_listing_is_read_or_refused_with_a_short_error(
    hub: Hub, patience: Patience, name: str, body: Any
) -> None:
    sent = body()
    hub.scripted = lambda _: (200, sent, {})
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    try:
        list_files(REPO, patience=patience)
    except LocalLLMError as e:
        assert len(e.message.encode()) < 1000  # noqa: PT017
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak - before < MOST_BYTES


def test_a_compressed_listing_is_refused(hub: Hub, patience: Patience) -> None:
    sent = bomb()
    hub.scripted = lambda _: (200, sent, {"Content-Encoding": "gzip"})
    with pytest.raises(LocalLLMError, match="it is compressed"):
        list_files(REPO, patience=patience)


def test_the_malformed_part_is_named(hub: Hub, patience: Patience) -> None:
    hub.scripted = lambda _: (200, b'{"sha": "%s", "siblings": [[]]}' % COMMIT.encode(), {})
    with pytest.raises(LocalLLMError, match=r"siblings\[0\] is a list, not an object"):
        list_files(REPO, patience=patience)
