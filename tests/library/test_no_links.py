"""On a disk without symbolic links (Windows, exFAT) the cache works like huggingface-hub's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from library.hub import Hub
from localllm.library import app_folders, hf_cache, store
from localllm.library.hub import Patience
from localllm.library.pull import pull
from localllm.library.resolve import resolve

REPO = "maker/Tiny-GGUF"


@pytest.fixture(autouse=True)
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **more: Any) -> None:
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)


def test_files_without_links_are_found_verified_and_removed(hub: Hub, patience: Patience) -> None:
    files = {
        f"Tiny-{quant}.gguf": b"GGUF" + random.Random(quant).randbytes(199_996)
        for quant in ("Q4_K_M", "Q8_0")
    }
    hub.add(REPO, files)
    for quant in ("Q4_K_M", "Q8_0"):
        local = pull(f"{REPO}:{quant}", patience=patience)
        assert not local.path.is_symlink()
        assert local.path.read_bytes() == files[local.path.name]
    hub.seen.clear()
    assert pull(f"{REPO}:Q8_0", patience=patience).path == resolve("tiny:Q8_0").path
    assert not [s for s in hub.seen if "/cdn/" in s.path], "what is here is not fetched again"
    assert store.waste() == []
    assert store.rm(resolve("tiny:Q8_0")) == 200_000
    assert [m.quant for m in hf_cache.scan(app_folders.hub_cache())] == ["Q4_K_M"]


def test_a_file_that_lost_its_end_is_fetched_again(hub: Hub, patience: Patience) -> None:
    content = b"GGUF" + random.Random(1).randbytes(199_996)
    hub.add(REPO, {"Tiny-Q8_0.gguf": content})
    path = pull(REPO, patience=patience).path
    path.write_bytes(content[:1000])
    assert pull(REPO, patience=patience).path.read_bytes() == content
