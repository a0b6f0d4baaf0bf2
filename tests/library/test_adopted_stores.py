"""Stores of LM Studio, Ollama and llama.cpp are found, and their files run in place."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.library import app_folders, store
from localllm.library.resolve import resolve
from localllm.library.types import LocalModel
from localllm_backends.contract import Chunk, LoadSpec
from support.safetensors import safetensors


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def found(origin: str) -> list[LocalModel]:
    return [m for m in store.scan() if m.origin == origin]


def run_in_place(model: LocalModel) -> None:
    """Load the file with the real backend and run one step. No file is written next to it."""
    from localllm.engine.worker.backends import for_path

    before = sorted(os.listdir(model.path.parent))
    backend = for_path(str(model.path)).load(LoadSpec(path=str(model.path), n_ctx=64, n_seq_max=1))
    try:
        line = backend.new_sequence()
        result = backend.step([Chunk(line, backend.tokenize("w7 w8"))])
        assert 0 <= result.argmax(0)[0] < backend.info.n_vocab
    finally:
        backend.close()
    assert sorted(os.listdir(model.path.parent)) == before


# --- LM Studio ------------------------------------------------------------------------------------
# https://lmstudio.ai/docs/basics/import-model: ~/.lmstudio/models/publisher/model/model-file.gguf


def test_an_lmstudio_folder_is_found_and_runs_in_place(home: Path, tiny_model: Path) -> None:
    file = put(
        home / ".lmstudio/models/maker/Tiny-1B-GGUF/Tiny-1B-Q4_K_M.gguf", tiny_model.read_bytes()
    )
    put(home / ".lmstudio/models/maker/Tiny-1B-GGUF/mmproj-Tiny-1B-F16.gguf", b"GGUFprojector")
    (model,) = found("lmstudio")
    assert (model.name, model.quant, model.repo, model.path) == (
        "Tiny-1B-Q4_K_M",
        "Q4_K_M",
        "maker/Tiny-1B-GGUF",
        file,
    )
    assert model.mmproj == file.with_name("mmproj-Tiny-1B-F16.gguf")
    for ref in ("tiny-1b", "Tiny-1B-Q4_K_M", "maker/Tiny-1B-GGUF", "maker/Tiny-1B-GGUF:q4_k_m"):
        assert resolve(ref).path == file, ref
    run_in_place(model)


@pytest.mark.parametrize("where", ["pointer", "older home", "settings"])
def test_an_lmstudio_folder_is_found_wherever_it_was_moved(
    home: Path, tmp_path: Path, where: str
) -> None:
    models = {
        "pointer": tmp_path / "lm/models",
        "older home": home / ".cache/lm-studio/models",
        "settings": tmp_path / "big disk",
    }[where]
    put(models / "maker/Tiny/Tiny-Q8_0.gguf", b"GGUF" * 2)
    if where == "pointer":
        put(home / ".lmstudio-home-pointer", f"{tmp_path / 'lm'}\n".encode())
    if where == "settings":
        put(home / ".lmstudio/settings.json", json.dumps({"downloadsFolder": str(models)}).encode())
    assert [m.name for m in found("lmstudio")] == ["Tiny-Q8_0"]


def test_an_lmstudio_mlx_folder_is_found(home: Path) -> None:
    folder = home / ".lmstudio/models/mlx-community/Tiny-4bit"
    put(folder / "config.json", b'{"quantization": {"group_size": 64, "bits": 4}}')
    put(folder / "model.safetensors", safetensors(b"1"))
    (model,) = found("lmstudio")
    assert (model.name, model.format, model.quant, model.path) == (
        "Tiny-4bit",
        "mlx",
        "4bit",
        folder,
    )


@pytest.mark.parametrize(
    "settings", [b"not json", b"[]", b'{"downloadsFolder": 7}', b'{"downloadsFolder": "/nowhere"}']
)
def test_damaged_lmstudio_settings_hide_no_models(home: Path, settings: bytes) -> None:
    put(home / ".lmstudio/settings.json", settings)
    put(home / ".lmstudio/models/maker/Tiny/Tiny-Q8_0.gguf", b"GGUF" * 2)
    assert len(found("lmstudio")) == 1


# --- Ollama ---------------------------------------------------------------------------------------
# https://github.com/ollama/ollama: manifest/manifest.go, manifest/paths.go, manifest/layer.go


def ollama_model(
    models: Path, weights: bytes, *name: str, config: dict[str, str] | None = None, **more: bytes
) -> Path:
    """Write a manifest like Ollama's, with blobs named by their hash.

    `more` are layers, by the end of their media type.
    """

    def blob(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        put(models / "blobs" / f"sha256-{digest}", content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    facts = (
        {"model_format": "gguf", "model_family": "llama", "file_type": "Q4_K_M"}
        if config is None
        else config
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": blob(
            json.dumps(facts).encode(), "application/vnd.docker.container.image.v1+json"
        ),
        "layers": [
            blob(weights, "application/vnd.ollama.image.model"),
            blob(b"{{ .Prompt }}", "application/vnd.ollama.image.template"),
            *(
                blob(content, f"application/vnd.ollama.image.{kind}")
                for kind, content in more.items()
            ),
        ],
    }
    return put(models.joinpath("manifests", *name), json.dumps(manifest).encode())


def test_an_ollama_store_is_found_and_runs_in_place(home: Path, tiny_model: Path) -> None:
    models = home / ".ollama/models"
    ollama_model(models, tiny_model.read_bytes(), "registry.ollama.ai", "library", "tiny", "1b")
    (model,) = found("ollama")
    digest = hashlib.sha256(tiny_model.read_bytes()).hexdigest()
    assert (model.name, model.quant, model.path) == (
        "tiny:1b",
        "Q4_K_M",
        models / "blobs" / f"sha256-{digest}",
    )
    assert resolve("tiny:1b").path == model.path
    assert store.verify(model).result == "ok"
    run_in_place(model)


@pytest.mark.parametrize(("parts", "name", "repo"), [
    (("registry.ollama.ai", "library", "tiny", "latest"), "tiny:latest", ""),
    (("registry.ollama.ai", "somebody", "tiny", "q8"), "somebody/tiny:q8", ""),
    (("hf.co", "maker", "Tiny-1B-GGUF", "Q8_0"), "hf.co/maker/Tiny-1B-GGUF:Q8_0", "maker/Tiny-1B-GGUF"),
])  # fmt: skip
def test_ollama_names_are_those_ollama_prints(
    home: Path, parts: tuple[str, ...], name: str, repo: str
) -> None:
    ollama_model(home / ".ollama/models", b"GGUF weights", *parts)
    (model,) = found("ollama")
    assert (model.name, model.repo) == (name, repo)
    assert resolve(name).path == model.path
    if parts[3] == "latest":
        assert resolve("tiny").path == model.path


def test_an_ollama_store_in_another_folder_counts_a_file_with_two_names_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "moved"
    monkeypatch.setenv("OLLAMA_MODELS", str(models))
    for tag in ("latest", "1b"):
        ollama_model(models, b"GGUF weights", "registry.ollama.ai", "library", "tiny", tag)
    assert sorted(m.name for m in found("ollama")) == ["tiny:1b", "tiny:latest"]
    (usage,) = [u for u in store.du() if u.origin == "ollama"]
    assert usage.size_bytes == len(b"GGUF weights"), "one file under two names is counted once"


def test_an_ollama_model_is_found_with_its_projector(home: Path) -> None:
    ollama_model(
        home / ".ollama/models",
        b"GGUF w",
        "registry.ollama.ai",
        "library",
        "eye",
        "1b",
        projector=b"GGUF p",
    )
    (model,) = found("ollama")
    assert model.mmproj is not None
    assert model.mmproj.read_bytes() == b"GGUF p"


def test_ollama_models_that_we_cannot_run_are_left_out(home: Path) -> None:
    models = home / ".ollama/models"
    ollama_model(
        models,
        b"GGUF a",
        "registry.ollama.ai",
        "library",
        "with-adapter",
        "1b",
        adapter=b"GGUF lora",
    )
    ollama_model(models, b"safetensors", "registry.ollama.ai", "library", "not-gguf", "1b")
    partial = ollama_model(models, b"GGUF partial", "registry.ollama.ai", "library", "cut", "1b")
    digest = json.loads(partial.read_text())["layers"][0]["digest"].removeprefix("sha256:")
    (models / "blobs" / f"sha256-{digest}").write_bytes(b"GGUF" * 2)
    assert found("ollama") == []


@pytest.mark.parametrize("manifest", [
    b"", b"[]", b"{}", b'{"layers": 3}', b'{"layers": [null, {"mediaType": '
                                         b'"application/vnd.ollama.image.model"}]}',
    b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": '
    b'"sha256:../../../x", "size": 4}]}',
    b"[" * 100_000,
])  # fmt: skip
def test_damaged_ollama_manifests_are_skipped(home: Path, manifest: bytes) -> None:
    models = home / ".ollama/models"
    put(models / "manifests/registry.ollama.ai/library/bad/latest", manifest)
    ollama_model(models, b"GGUF good", "registry.ollama.ai", "library", "good", "latest")
    assert [m.name for m in found("ollama")] == ["good:latest"]


# --- llama.cpp ------------------------------------------------------------------------------------
# https://github.com/ggml-org/llama.cpp: common/common.cpp (flat files), common/hf-cache.cpp (the
# hub's layout)


def test_a_llamacpp_cache_is_found_and_runs_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    cache = tmp_path / "llama.cpp"
    monkeypatch.setenv("LLAMA_CACHE", str(cache))
    file = put(cache / "maker_Tiny-1B-GGUF_Tiny-1B-Q4_K_M.gguf", tiny_model.read_bytes())
    put(cache / "maker_Tiny-1B-GGUF_mmproj-F16.gguf", b"GGUFproj")
    put(cache / "maker_Tiny-1B-GGUF_Tiny-1B-Q4_K_M.gguf.etag", b'"abc"')
    put(cache / "manifest=maker=Tiny-1B-GGUF=Q4_K_M.json", b"{}")
    put(cache / "other_Half-GGUF_Half-Q4_K_M.gguf.downloadInProgress", b"GGUF" * 2)
    (model,) = found("llama.cpp")
    assert (model.name, model.repo, model.quant, model.path) == (
        "Tiny-1B-Q4_K_M",
        "maker/Tiny-1B-GGUF",
        "Q4_K_M",
        file,
    )
    assert model.mmproj is not None
    for ref in ("tiny-1b", "maker/Tiny-1B-GGUF:Q4_K_M"):
        assert resolve(ref).path == file, ref
    run_in_place(model)


def test_llamacpps_default_place_and_split_files(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    cache = home / ".cache/llama.cpp"
    for n in (1, 2):
        put(cache / f"maker_Big-GGUF_Big-Q8_0-{n:05d}-of-00002.gguf", b"GGUF" * 2)
    put(cache / "maker_Cut-GGUF_Cut-Q8_0-00001-of-00002.gguf", b"GGUF" * 2)
    (model,) = found("llama.cpp")
    assert len(model.files) == 2
    assert resolve("big").path == model.path


def test_llamacpps_newer_cache_is_the_hubs_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "llama-cache"
    monkeypatch.setenv("LLAMA_CACHE", str(cache))
    repo = cache / "models--maker--Tiny-1B-GGUF"
    blob = put(repo / "blobs" / ("a" * 64), b"GGUF" * 2)
    pointer = repo / "snapshots" / ("b" * 40) / "Tiny-1B-Q4_K_M.gguf"
    pointer.parent.mkdir(parents=True)
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    (model,) = found("llama.cpp")
    assert (model.path, model.repo) == (pointer, "maker/Tiny-1B-GGUF")


# --- folders adopted by name ----------------------------------------------------------------------


def test_an_adopted_folder_is_listed_until_it_is_forgotten(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "my models"
    file = put(folder / "sub/Mine-Q8_0.gguf", tiny_model.read_bytes())
    assert [m.path for m in store.adopt(folder)] == [file]
    store.adopt(folder)
    assert [m.path for m in found("folder")] == [file]
    assert app_folders.remembered() == [folder]
    run_in_place(resolve("mine"))
    store.forget(folder)
    assert found("folder") == []
    assert file.exists()
    with pytest.raises(UsageError):
        store.forget(folder)


def test_a_folder_without_models_is_not_adopted(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        store.adopt(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        store.adopt(tmp_path / "empty")
    assert app_folders.remembered() == []


def test_a_file_two_apps_share_is_listed_once(home: Path) -> None:
    file = put(home / ".lmstudio/models/maker/Tiny/Tiny-Q8_0.gguf", b"GGUF" * 2)
    link = home / ".cache/llama.cpp/maker_Tiny_Tiny-Q8_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(file)
    assert [m.origin for m in store.scan() if m.origin != "starter"] == ["lmstudio"]


@pytest.mark.parametrize("origin", ["lmstudio", "folder"])
def test_models_of_other_applications_are_not_removed(
    home: Path, tmp_path: Path, origin: str
) -> None:
    if origin == "lmstudio":
        file = put(home / ".lmstudio/models/maker/Tiny/Tiny-Q8_0.gguf", b"GGUF" * 2)
    else:
        file = put(tmp_path / "mine/Tiny-Q8_0.gguf", b"GGUF" * 2)
        store.adopt(tmp_path / "mine")
    with pytest.raises(UsageError) as e:
        store.rm(resolve("tiny"))
    assert str(file) in e.value.hint
    assert file.exists()
