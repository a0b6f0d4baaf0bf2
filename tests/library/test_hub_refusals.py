"""Refusals before weights are downloaded, with the hub's reasons or ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub.constants
import pytest

from library.hub import Hub, Seen
from localllm.errors import DownloadError, UsageError
from localllm.library import app_folders, store
from localllm.library.hub import Patience
from localllm.library.pull import pull
from localllm.library.resolve import resolve

CONFIG = json.dumps({"quantization": {"bits": 4, "group_size": 64}, "model_type": "tiny"}).encode()
REPO = "mlx-community/Tiny-4bit"


def weights_requested(hub: Hub) -> list[str]:
    return [seen.path for seen in hub.seen if seen.path.endswith(".safetensors")]


def test_mlx_weights_with_a_shard_missing_are_refused_before_they_are_downloaded(
    hub: Hub, patience: Patience
) -> None:
    shards = {f"model-0000{n}-of-00003.safetensors": bytes(20_000) for n in (1, 2)}
    hub.add(REPO, {"config.json": CONFIG, **shards})
    with pytest.raises(DownloadError, match=r"model-00003-of-00003\.safetensors"):
        pull(REPO, patience=patience)
    assert weights_requested(hub) == []


def test_mlx_weights_that_the_index_names_are_all_needed(hub: Hub, patience: Patience) -> None:
    index = json.dumps({"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}})
    files = {
        "config.json": CONFIG,
        "model.safetensors.index.json": index.encode(),
        "first.safetensors": bytes(20_000),
    }
    hub.add(REPO, files)
    with pytest.raises(DownloadError, match=r"it has no second\.safetensors"):
        pull(REPO, patience=patience)
    assert weights_requested(hub) == []


def test_an_access_request_under_review_gives_the_hubs_message(
    hub: Hub, patience: Patience
) -> None:
    words = "Your request to access model org/Tiny is awaiting a review from the repo authors."

    def awaiting(_: Seen) -> tuple[int, bytes, dict[str, str]]:
        return 403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": words}

    hub.scripted = awaiting
    with pytest.raises(DownloadError, match="awaiting a review") as caught:
        pull("org/Tiny", patience=patience)
    assert "wait until its authors accept" in caught.value.hint
    assert "HF_TOKEN" not in caught.value.hint


def test_a_token_path_that_is_a_folder_is_named(
    hub: Hub, patience: Patience, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path))
    with pytest.raises(UsageError, match=str(tmp_path)) as caught:
        pull("org/Tiny", patience=patience)
    assert "HF_TOKEN_PATH" in caught.value.hint


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_file_that_can_not_be_used_is_named(
    hub: Hub,
    patience: Patience,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str | None,
) -> None:
    for other in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(other, raising=False)
    place = tmp_path / "none.pem"
    if content is not None:
        place.write_text(content)
    monkeypatch.setenv(name, str(place))
    with pytest.raises(UsageError, match=name) as caught:
        pull("org/Tiny", patience=patience)
    assert str(place) in str(caught.value)


# --- the store shared by repositories -------------------------------------------------------------


@pytest.fixture
def shared(cache: Path, tiny_model: Path) -> Path:
    """Return a model whose blob huggingface-hub moved to the store that all repositories share."""
    from huggingface_hub.utils import _shared_blobs

    blob = cache / "models--maker--Tiny-GGUF" / "blobs" / ("d" * 64)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(tiny_model.read_bytes())
    moved = _shared_blobs.publish_blob_to_shared_store(
        blob_path=blob, xet_hash="a" * 64, cache_dir=cache, expected_size=blob.stat().st_size
    )
    assert moved
    pointer = blob.parent.parent / "snapshots" / ("b" * 40) / "Tiny-Q8_0.gguf"
    pointer.parent.mkdir(parents=True)
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    return cache / "blobs" / "aa" / ("a" * 64)


def test_removing_a_model_frees_its_shared_blob(shared: Path, tiny_model: Path) -> None:
    assert store.rm(resolve("Tiny-Q8_0")) >= tiny_model.stat().st_size
    assert not shared.exists()


def test_prune_and_du_see_a_shared_blob_that_nothing_uses(shared: Path, tiny_model: Path) -> None:
    size = tiny_model.stat().st_size
    assert {usage.origin: usage.size_bytes for usage in store.du()}["hf-cache"] == size
    blob = app_folders.hub_cache() / "models--maker--Tiny-GGUF" / "blobs" / ("d" * 64)
    blob.unlink()
    assert {usage.origin: usage.size_bytes for usage in store.du()}["unused"] == size
    later = shared.stat().st_mtime + 3600
    assert shared in [item.path for item in store.waste(now=later)]
    assert store.prune(store.waste(now=later)) >= size
    assert not shared.exists()
