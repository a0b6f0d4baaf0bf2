"""The model that is used without -m if the largest one cannot be loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from library.test_resolve import cached, no_starter, with_template
from localllm.errors import ModelFileError
from localllm.library import app_folders
from localllm.library.resolve import resolve
from localllm.load.load_plan import load_plan_named
from localllm.settings import Settings
from models import tiny_mlx


def ollama_store(home: Path, weights: bytes) -> None:
    """Write a store of Ollama with one model."""
    models = home / ".ollama" / "models"
    (models / "blobs").mkdir(parents=True)
    digest = hashlib.sha256(weights).hexdigest()
    (models / "blobs" / f"sha256-{digest}").write_bytes(weights)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": len(weights),
    }
    place = models / "manifests" / "registry.ollama.ai" / "library" / "qwen3.5"
    place.mkdir(parents=True)
    (place / "4b").write_text(json.dumps({"schemaVersion": 2, "config": layer, "layers": [layer]}))


def ollamas_layout(path: Path) -> bytes:
    """Return a file as only Ollama writes it: gpt-oss under another architecture's name."""
    writer = gguf.GGUFWriter(path, "gptoss")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_tensor("token_embd.weight", np.zeros((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_model_in_ollamas_own_layout_is_skipped_with_a_message(
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    no_starter(monkeypatch)
    small = with_template(tmp_path, 0)
    large = ollamas_layout(tmp_path / "ollama.gguf")
    ollama_store(home, large + b"\0" * len(small))
    cached("maker/Small-GGUF", "Small-Q4_K_M.gguf", small)
    assert resolve(None).name == "Small-Q4_K_M"
    assert "qwen3.5:4b" in caplog.text
    assert "-m MODEL" in caplog.text


def test_a_model_in_ollamas_own_layout_alone_is_an_error_with_its_reason(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_starter(monkeypatch)
    ollama_store(home, ollamas_layout(tmp_path / "ollama.gguf"))
    with pytest.raises(ModelFileError) as caught:
        resolve(None)
    assert "Ollama's own layout" in str(caught.value)


@pytest.mark.mlx
@pytest.mark.parametrize("sign", ["modules.json", "Qwen3Model", "BertForSequenceClassification"])
def test_an_mlx_embedding_model_is_never_chosen_for_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    """An MLX embedding model is never selected for a chat.

    Its name does not show its kind. The files of sentence-transformers or the config's class do.
    """
    no_starter(monkeypatch)
    cached("maker/Small-GGUF", "Small-Q4_K_M.gguf", with_template(tmp_path, 0))
    repo = app_folders.hub_cache() / "models--maker--Vectors-4bit"
    folder = tiny_mlx.write_4bit(repo / "snapshots" / ("c" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    assert resolve(None).name == "Vectors-4bit"
    if sign == "modules.json":
        (folder / sign).write_text("[]")
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [sign]}))
    assert resolve(None).name == "Small-Q4_K_M"
    with pytest.raises(ModelFileError, match="can't be run from an MLX folder") as refused:
        load_plan_named("Vectors-4bit", Settings())
    assert "GGUF" in refused.value.hint
