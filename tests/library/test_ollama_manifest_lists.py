"""Ollama's newer layout: manifests-v2/, one tag for several runners, and manifests among the blobs.

https://github.com/ollama/ollama: manifest/paths.go, manifest/manifest.go
(MediaTypeManifestList).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from localllm.library import store
from localllm.library.resolve import resolve

pytestmark = pytest.mark.usefixtures("nothing_packaged")


@pytest.fixture
def models(home: Path) -> Path:
    folder = home / ".ollama" / "models"
    (folder / "blobs").mkdir(parents=True)
    return folder


def blob(models: Path, content: bytes, kind: str) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    (models / "blobs" / f"sha256-{digest}").write_bytes(content)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}


def manifest(models: Path, weights: bytes, **more: str) -> dict[str, Any]:
    config = blob(
        models,
        json.dumps({"file_type": "Q4_K_M"}).encode(),
        "application/vnd.docker.container.image.v1+json",
    )
    layers = [blob(models, weights, "application/vnd.ollama.image.model")]
    media_type = "application/vnd.docker.distribution.manifest.v2+json"
    return {"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": layers, **more}


def listed(*children: dict[str, Any]) -> bytes:
    kind = "application/vnd.ollama.manifest.list.v2+json"
    return json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": children}).encode()


def put(models: Path, content: bytes, *name: str) -> Path:
    path = models.joinpath(*name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_store_with_only_the_newer_layout_is_found(models: Path) -> None:
    put(
        models,
        json.dumps(manifest(models, b"GGUF a")).encode(),
        "manifests-v2",
        "ollama.com",
        "library",
        "tiny",
        "1b",
    )
    (model,) = store.scan()
    assert (model.name, model.quant, model.path.read_bytes()) == ("tiny:1b", "Q4_K_M", b"GGUF a")


def test_a_tag_that_links_to_a_manifest_among_the_blobs_is_followed(models: Path) -> None:
    content = json.dumps(manifest(models, b"GGUF a")).encode()
    target = models / "blobs" / f"sha256-{hashlib.sha256(content).hexdigest()}"
    target.write_bytes(content)
    tag = models / "manifests-v2" / "ollama.com" / "library" / "tiny" / "latest"
    tag.parent.mkdir(parents=True)
    tag.symlink_to(target)
    assert resolve("tiny").path.read_bytes() == b"GGUF a"


def test_a_name_in_both_layouts_is_one_model_from_the_newer_layout(models: Path) -> None:
    put(
        models,
        json.dumps(manifest(models, b"GGUF old")).encode(),
        "manifests",
        "registry.ollama.ai",
        "library",
        "t",
        "1b",
    )
    put(
        models,
        json.dumps(manifest(models, b"GGUF new")).encode(),
        "manifests-v2",
        "ollama.com",
        "library",
        "t",
        "1b",
    )
    (model,) = store.scan()
    assert model.path.read_bytes() == b"GGUF new"


@pytest.mark.parametrize("as_reference", [False, True])
def test_the_llamacpp_manifest_of_a_manifest_list_is_used(models: Path, as_reference: bool) -> None:
    def child(weights: bytes, runner: str, form: str) -> dict[str, Any]:
        whole = manifest(models, weights, runner=runner, format=form)
        if not as_reference:
            return whole
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        named = blob(models, json.dumps(whole).encode(), kind)
        return {"mediaType": kind, "digest": named["digest"], "runner": runner, "format": form}

    children = [
        child(b"st", "mlx", "safetensors"),
        child(b"GGUF own", "ollama", "gguf"),
        child(b"GGUF cpp", "llamacpp", "gguf"),
    ]
    tag = put(models, listed(*children), "manifests-v2", "ollama.com", "library", "t", "1b")
    assert [m.path.read_bytes() for m in store.scan()] == [b"GGUF cpp"]
    tag.write_bytes(listed(*children[:2]))
    assert [m.path.read_bytes() for m in store.scan()] == [b"GGUF own"]
    tag.write_bytes(listed(*children[:1]))
    assert store.scan() == []


@pytest.mark.parametrize("children", [
    [], [{"digest": "sha256:../../x", "runner": "llamacpp"}], [{"digest": "sha256:" + "0" * 64, "runner": "ollama"}], [{}],
])  # fmt: skip
def test_manifest_lists_without_a_usable_entry_are_skipped(
    models: Path, children: list[dict[str, Any]]
) -> None:
    put(models, listed(*children), "manifests-v2", "ollama.com", "library", "t", "1b")
    assert store.scan() == []
