"""Names that users give to models, and the resulting plans.

A quant is used or refused in every form of name, and the hub is queried last.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from library.hub import Hub
from localllm.errors import DownloadError, ModelNotFoundError, UsageError
from localllm.library.catalog import load_catalog, read_model
from localllm.library.describe import describe
from localllm_catalog.catalog import Catalog
from localllm_catalog.types import Model
from models import tiny_gguf

REPO = "Qwen/Qwen3-8B-GGUF"


@pytest.fixture(scope="module")
def known() -> Catalog:
    return load_catalog()


def mlx_folder(folder: Path) -> Path:
    """Write an MLX folder with a valid config and only a few bytes of weights."""
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096,
        "quantization": {"group_size": 64, "bits": 4},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(3_000))
    return folder


def quants(model: Model) -> list[tuple[str, str, int]]:
    return [(v.quant, v.repo, v.file_bytes) for v in model.variants]


@pytest.mark.parametrize(
    "form", [REPO, f"hf.co/{REPO}", f"https://huggingface.co/{REPO}", "qwen/qwen3-8b-gguf"]
)
def test_a_repository_of_the_catalog_is_described_without_a_request(
    form: str, known: Catalog
) -> None:
    model, quant = describe(form, known, offline=True)
    assert (model.id, quant) == ("qwen3-8b", "")
    assert {repo for _, repo, _ in quants(model)} == {REPO}
    model, quant = describe(f"{form}:Q4_K_M", known, offline=True)
    assert [q for q, _, _ in quants(model)] == [quant] == ["Q4_K_M"]


def test_a_models_own_repository_means_all_of_its_files(known: Catalog) -> None:
    model, _ = describe("Qwen/Qwen3-8B", known, offline=True)
    assert model == known.by_id["qwen3-8b"]


def test_the_address_of_a_file_selects_that_file(known: Catalog) -> None:
    file = next(v for v in known.by_id["qwen3-8b"].variants if v.repo == REPO and v.files)
    model, _ = describe(
        f"https://huggingface.co/{REPO}/blob/main/{file.files[0]}", known, offline=True
    )
    assert model.variants == (file,)


@pytest.mark.parametrize(
    "form",
    ["qwen3-8b:Q99", f"{REPO}:Q99", f"hf.co/{REPO}:Q99", "Qwen/Qwen3-8B:Q99", "somebody/else", "nothing", "./no.gguf",
     "./no.gguf:Q4_K_M", f"https://huggingface.co/{REPO}/blob/main/other.gguf"],
)  # fmt: skip
def test_a_missing_model_is_an_error_in_every_form_of_reference(form: str, known: Catalog) -> None:
    with pytest.raises(ModelNotFoundError):
        describe(form, known, offline=True)


@pytest.mark.parametrize("form", [":Q4_K_M", "https://example.com/x.gguf", "../a/b:Q4"])
def test_an_invalid_reference_is_refused(form: str, known: Catalog) -> None:
    with pytest.raises((UsageError, ModelNotFoundError)):
        describe(form, known, offline=True)


def test_files_and_folders_on_this_disk_are_read(tmp_path: Path, known: Catalog) -> None:
    file = tiny_gguf.write_hybrid(tmp_path / "SOME.GGUF")
    model, quant = describe(str(file), known)
    assert (model.layers, quant) == (read_model(file).layers, "")
    folder = mlx_folder(tmp_path / "tiny-4bit")
    model, _ = describe(str(folder), known)
    assert model.variants[0].format == "mlx"


def test_an_installed_model_goes_by_its_name(
    tmp_path: Path, home: Path, known: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    monkeypatch.setenv("LLAMA_CACHE", str(models))
    file = tiny_gguf.write_hybrid(tmp_path / "a.gguf")
    shutil.copy(file, models / "my-own-tune-Q8_0.gguf")
    model, _ = describe("my-own-tune", known, offline=True)
    assert model.layers == read_model(file).layers


def test_an_unknown_repository_is_read_from_one_header(
    hub: Hub, tmp_path: Path, known: Catalog
) -> None:
    file = tiny_gguf.write_hybrid(tmp_path / "model.gguf")
    larger = file.read_bytes() + bytes(5_000)
    hub.add(
        "somebody/Newest-1B-GGUF",
        {"Newest-1B-Q4_K_M.gguf": file.read_bytes(), "Newest-1B-Q8_0.gguf": larger},
    )
    model, _ = describe("somebody/Newest-1B-GGUF", known)
    assert model.layers == read_model(file).layers
    assert quants(model) == [
        ("Q4_K_M", "somebody/Newest-1B-GGUF", file.stat().st_size),
        ("Q8_0", "somebody/Newest-1B-GGUF", len(larger)),
    ]
    model, _ = describe("somebody/Newest-1B-GGUF:q8_0", known)
    assert [q for q, _, _ in quants(model)] == ["Q8_0"]
    model, _ = describe(
        f"{hub.url}/somebody/Newest-1B-GGUF/resolve/main/Newest-1B-Q8_0.gguf", known
    )
    assert [q for q, _, _ in quants(model)] == ["Q8_0"]
    with pytest.raises(DownloadError, match="no variant Q99"):
        describe("somebody/Newest-1B-GGUF:Q99", known)


def test_an_unlisted_repository_of_a_known_model_is_described(hub: Hub, known: Catalog) -> None:
    """An unlisted repository of a known model.

    The sizes come from the hub's listing, the shapes from the catalog. Files that are not the
    model (a draft head) are left out.
    """
    hub.add("somebody/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": bytes(400)})
    with pytest.raises(DownloadError, match=r"no files of Qwen3 0\.6B"):
        describe("somebody/Qwen3-0.6B-GGUF", known)


def test_an_mlx_repository_is_read_from_its_config(
    hub: Hub, tmp_path: Path, known: Catalog
) -> None:
    folder = mlx_folder(tmp_path / "tiny-4bit")
    files = {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}
    hub.add("somebody/tiny-4bit", files)
    model, _ = describe("somebody/tiny-4bit", known)
    assert model.layers == read_model(folder).layers
    assert quants(model) == [
        (
            "4bit",
            "somebody/tiny-4bit",
            sum(len(c) for n, c in files.items() if n.endswith(".safetensors")),
        )
    ]
