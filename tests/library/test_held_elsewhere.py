"""Files that another application already has are used, and never downloaded again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from library.hub import Hub
from localllm.library import store
from localllm.library.hub import Patience
from localllm.library.pull import pull

pytestmark = pytest.mark.usefixtures("nothing_packaged")


def ollama_store(folder: Path, gguf: Path) -> Path:
    """Write a store like Ollama's: manifests/HOST/NAMESPACE/MODEL/TAG and blobs/sha256-HEX."""
    blobs = folder / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / f"sha256-{digest}").write_bytes(content)
        return {
            "mediaType": f"application/vnd.ollama.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(content),
        }

    config = blob(json.dumps({"model_format": "gguf", "file_type": "Q4_K_M"}).encode(), "config")
    config["mediaType"] = "application/vnd.docker.container.image.v1+json"
    layers = [blob(gguf.read_bytes(), "model"), blob(b"{{ .Prompt }}", "template")]
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "1b"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}))
    return folder


@pytest.mark.parametrize("app", ["ollama", "lmstudio", "llama.cpp"])
def test_pull_uses_a_file_of_another_application_instead_of_downloading_it(
    hub: Hub,
    home: Path,
    tiny_model: Path,
    patience: Patience,
    app: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.add(
        "maker/Tiny-1B-GGUF",
        {"Tiny-1B-Q4_K_M.gguf": tiny_model.read_bytes(), "Tiny-1B-Q8_0.gguf": b"y" * 50_000},
    )
    if app == "ollama":
        ollama_store(home / ".ollama" / "models", tiny_model)
    elif app == "lmstudio":
        folder = home / ".lmstudio" / "models" / "maker" / "Tiny-1B-GGUF"
        folder.mkdir(parents=True)
        shutil.copy(tiny_model, folder / "Tiny-1B-Q4_K_M.gguf")
    else:
        cache = home / "llama"
        cache.mkdir()
        monkeypatch.setenv("LLAMA_CACHE", str(cache))
        shutil.copy(tiny_model, cache / "maker_Tiny-1B-GGUF_Tiny-1B-Q4_K_M.gguf")
        (cache / "manifest=maker=Tiny-1B-GGUF=latest.json").write_text("{}")
    assert pull("maker/Tiny-1B-GGUF", patience=patience).origin == app
    assert not hub.contents()
    assert pull("maker/Tiny-1B-GGUF:Q8_0", patience=patience).origin == "hf-cache"


def test_an_adopted_folder_on_an_unplugged_drive_stays_adopted(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "drive"
    folder.mkdir()
    shutil.copy(tiny_model, folder / "Mine-Q6_K.gguf")
    store.adopt(folder)
    folder.rename(tmp_path / "unplugged")
    assert store.scan() == []
    (tmp_path / "unplugged").rename(folder)
    assert len(store.scan()) == 1
