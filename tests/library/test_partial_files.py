"""Truncated model files are not listed, are named once, and can be removed."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm.cli.commands import models
from localllm.errors import ModelFileError, UnsupportedError
from localllm.library import app_folders, hf_cache, partial_files, store
from localllm.library.resolve import resolve
from localllm.load.drafters_and_projector import projector_for
from localllm.settings import Settings
from localllm_backends.llamacpp import LlamaCppType, backend_type
from models.tiny_gguf import write_moe
from models.tiny_vision import write_vision

pytestmark = pytest.mark.usefixtures("nothing_packaged")
BROKEN_JSON = '{"left": '


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """Return an adopted folder with a complete file, and one that lacks the end of its weights."""
    made = tmp_path / "mine"
    made.mkdir()
    shutil.copy(tiny_model, made / "whole-F32.gguf")
    (made / "half-F32.gguf").write_bytes(tiny_model.read_bytes()[:-1000])
    store.adopt(made)
    return made


@pytest.mark.parametrize("kept", [4, 30, 2_000, 0.5, 0.999])
def test_a_cut_file_is_not_listed_wherever_it_is_cut(
    kept: float, tmp_path: Path, tiny_model: Path
) -> None:
    content = tiny_model.read_bytes()
    n_bytes = int(kept * len(content)) if kept < 1 else int(kept)
    made = tmp_path / "mine"
    made.mkdir()
    shutil.copy(tiny_model, made / "whole-F32.gguf")
    (made / "half-F32.gguf").write_bytes(content[:n_bytes])
    store.adopt(made)
    assert [model.name for model in store.scan()] == ["whole-F32"]
    with pytest.raises(ModelFileError, match=f"of the file \\({n_bytes}|of a file of {n_bytes}"):
        resolve("half-F32")


@pytest.mark.parametrize("name", ["half.gguf", "sha256-half"])
@pytest.mark.parametrize("n_bytes", [2_000, -1000])
def test_info_reports_a_truncated_file_as_not_usable(
    name: str, n_bytes: int, tmp_path: Path, tiny_model: Path
) -> None:
    file = tmp_path / "mine" / name
    file.parent.mkdir()
    file.write_bytes(tiny_model.read_bytes()[:n_bytes])
    told = CliRunner().invoke(models.app, ["info", str(file)]).stdout
    assert "not usable: " in told
    assert "may be cut short" in told
    row = json.loads(CliRunner().invoke(models.app, ["info", str(file), "--json"]).stdout)
    assert "may be cut short" in row["local"]["fault"]
    whole = json.loads(CliRunner().invoke(models.app, ["info", str(tiny_model), "--json"]).stdout)
    assert whole["local"]["fault"] == ""


@pytest.mark.parametrize(("at", "damage"), [(4, b"\x63"), (8, b"\xff" * 8), (24, b"\xff" * 8)])
def test_info_gives_the_reason_why_a_header_cannot_be_read(
    at: int, damage: bytes, tmp_path: Path, tiny_model: Path
) -> None:
    file = tmp_path / "damaged.gguf"
    content = bytearray(tiny_model.read_bytes())
    content[at : at + len(damage)] = damage
    file.write_bytes(content)
    assert "not usable: " in CliRunner().invoke(models.app, ["info", str(file)]).stdout
    row = json.loads(CliRunner().invoke(models.app, ["info", str(file), "--json"]).stdout)
    assert row["local"]["fault"].count("damaged.gguf") == 1


def test_a_file_is_listed_as_soon_as_it_is_complete(folder: Path, tiny_model: Path) -> None:
    assert [model.name for model in store.scan()] == ["whole-F32"]
    shutil.copy(tiny_model, folder / "half-F32.gguf")
    assert sorted(model.name for model in store.scan()) == ["half-F32", "whole-F32"]
    assert resolve("half-F32").path == folder / "half-F32.gguf"


def test_a_split_with_a_cut_part_is_not_listed(tmp_path: Path, tiny_model: Path) -> None:
    made = tmp_path / "mine"
    made.mkdir()
    for part in (1, 2):
        shutil.copy(tiny_model, made / f"big-Q8_0-{part:05d}-of-00002.gguf")
    store.adopt(made)
    assert len(store.scan()) == 1
    second = made / "big-Q8_0-00002-of-00002.gguf"
    second.write_bytes(second.read_bytes()[:-1000])
    assert store.scan() == []
    [model] = store.everything()
    assert "of a file of" in model.fault


def test_the_list_names_what_it_leaves_out(folder: Path) -> None:
    result = CliRunner().invoke(models.app, ["list"])
    assert "half" not in result.stdout
    assert result.stderr.count("half-F32.gguf") == 1
    assert "may be cut short" in result.stderr
    listed = json.loads(CliRunner().invoke(models.app, ["list", "--json"]).stdout)
    assert [model["name"] for model in listed["models"]] == ["whole-F32"]
    [left_out] = listed["left_out"]
    assert (left_out["name"], "cut short" in left_out["fault"]) == ("half-F32", True)


def test_a_whole_quant_is_chosen_before_a_cut_one(tmp_path: Path, tiny_model: Path) -> None:
    made = tmp_path / "mine"
    made.mkdir()
    write_moe(made / "tiny-F32.gguf")
    (made / "tiny-F32.gguf").write_bytes((made / "tiny-F32.gguf").read_bytes()[:-1000])
    shutil.copy(tiny_model, made / "tiny-Q8_0.gguf")
    store.adopt(made)
    assert resolve("tiny").quant == "Q8_0"


def test_a_cut_file_is_counted_and_removed(tiny_model: Path) -> None:
    repo = hf_cache.repo_folder(app_folders.hub_cache(), "maker/Tiny-GGUF")
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "Tiny-Q8_0.gguf").write_bytes(tiny_model.read_bytes()[:-1000])
    [usage] = store.du()
    assert usage.size_bytes == len(tiny_model.read_bytes()) - 1000
    assert CliRunner().invoke(models.app, ["rm", "tiny", "--yes"]).exit_code == 0
    assert store.everything() == []


def test_headers_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [*folder.iterdir()]
    found = partial_files.reasons(files)
    monkeypatch.setattr("localllm_catalog.gguf.check_length", lambda _: pytest.fail("read again"))
    assert partial_files.reasons(files) == found
    assert [file.name for file in found] == ["half-F32.gguf"]


def test_damaged_and_unwritable_records_hide_no_models(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE_DIR", str(folder / "whole-F32.gguf"))
    (folder / "half-F32.gguf").touch()
    assert [model.name for model in store.scan()] == ["whole-F32"]
    kept = tmp_path / "cache" / "partial-files.json"
    kept.parent.mkdir()
    kept.write_text(BROKEN_JSON)
    monkeypatch.setenv("LOCALLLM_CACHE_DIR", str(kept.parent))
    (folder / "half-F32.gguf").touch()
    assert [model.name for model in store.scan()] == ["whole-F32"]


# --- safetensors ----------------------------------------------------------------------------------

N_WEIGHTS = 1000


def safetensors() -> bytes:
    """Return a safetensors file of two tensors."""
    half = 4 * N_WEIGHTS // 2
    header = json.dumps(
        {
            "__metadata__": {"format": "mlx"},
            "last": {"dtype": "F32", "shape": [500], "data_offsets": [half, 2 * half]},
            "first": {"dtype": "F32", "shape": [500], "data_offsets": [0, half]},
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(2 * half)


def write_folder(folder: Path, *shards: bytes) -> Path:
    """Write an MLX folder with these weight files."""
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "quantization": {"bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    for number, content in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / name).write_bytes(content)
    return folder


WHOLE = safetensors()
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 335\n"
WEB_PAGE = b"<!DOCTYPE html><html></html>"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (WHOLE[:1], "header extends past the end of a file of 1"),
        (WHOLE[:8], "header extends past the end of a file of 8"),
        (WHOLE[:60], "header ends at byte .* of a file of 60"),
        (WHOLE[:-N_WEIGHTS], "last ends at byte"),
        (WHOLE[:-1], "last ends at byte"),
        (LFS_POINTER, "git lfs pull"),
        (WEB_PAGE, "web page, not a safetensors file"),
        (bytes(500), "only zero bytes"),
    ],
)
def test_a_folder_with_a_cut_shard_is_not_listed(content: bytes, why: str, tmp_path: Path) -> None:
    made = tmp_path / "mine"
    write_folder(made / "whole-4bit", WHOLE, WHOLE)
    half = write_folder(made / "half-4bit", WHOLE, content)
    store.adopt(made)
    assert [model.name for model in store.scan()] == ["whole-4bit"]
    for typed in ("half-4bit", str(half)):
        with pytest.raises(ModelFileError, match=f"model-00002-of-00002.safetensors: .*{why}"):
            resolve(typed)
    result = CliRunner().invoke(models.app, ["list"])
    assert "half" not in result.stdout
    assert result.stderr.count("half-4bit") == 1
    assert CliRunner().invoke(models.app, ["verify", "half-4bit"]).exit_code == 4
    (half / "model-00002-of-00002.safetensors").write_bytes(WHOLE)
    assert resolve("half-4bit").path == half


@pytest.mark.parametrize("header", [b"{}", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"{\xff}"])
def test_an_unknown_form_of_safetensors_header_is_not_a_fault(
    header: bytes, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "odd-4bit", struct.pack("<Q", len(header)) + header + b" ")
    assert resolve(str(folder)).fault == ""


# --- projectors -----------------------------------------------------------------------------------


def test_a_cut_projector_is_named_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCppType, "reads_images", lambda _: None)
    made = tmp_path / "mine"
    made.mkdir()
    seeing = write_vision(made, "llava")
    content = seeing.projector.read_bytes()
    seeing.projector.write_bytes(content[:-100])
    store.adopt(made)
    [model] = store.scan()
    assert "of a file of" in model.mmproj_fault
    result = CliRunner().invoke(models.app, ["list"])
    assert result.stderr.count(seeing.projector.name) == 1
    assert "reads no images" in result.stderr
    [row] = json.loads(CliRunner().invoke(models.app, ["list", "--json"]).stdout)["models"]
    assert row["mmproj_fault"] == model.mmproj_fault
    assert "not usable" in CliRunner().invoke(models.app, ["info", model.name]).stdout
    found = projector_for(model, backend_type, Settings({}))
    assert (found.file, "cut short" in found.why_not) == (None, True)
    with pytest.raises(UnsupportedError, match="cut short"):
        projector_for(model, backend_type, Settings({"images": "on"}))
    seeing.projector.write_bytes(content)
    [model] = store.scan()
    assert (model.mmproj, model.mmproj_fault) == (seeing.projector, "")


def test_a_whole_projector_is_chosen_before_a_cut_one(tmp_path: Path) -> None:
    made = tmp_path / "mine"
    made.mkdir()
    seeing = write_vision(made, "llava")
    content = seeing.projector.read_bytes()
    store.adopt(made)
    for quant in ("f16", "bf16", "f32"):
        (made / f"mmproj-{quant}.gguf").write_bytes(content[:-100])
    [model] = store.scan()
    assert (model.mmproj, model.mmproj_fault) == (seeing.projector, "")
