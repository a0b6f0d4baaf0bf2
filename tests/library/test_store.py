"""Disk management: lists, sizes, checks, and files that may or may not be removed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from localllm.cli.commands import models as models_command
from localllm.errors import LocalLLMError, UsageError
from localllm.library import app_folders, hf_cache, starter, store
from localllm.library.resolve import resolve
from support.safetensors import safetensors

OLD = time.time() - 3600


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def cached(repo: str, files: dict[str, bytes], commit: str = "b" * 40) -> dict[str, Path]:
    """Write a repository in the hub's cache like huggingface-hub: blobs by hash, links, and a
    ref."""
    folder = hf_cache.repo_folder(app_folders.hub_cache(), repo)
    pointers = {}
    for name, content in files.items():
        digest = (
            git_sha1(content) if name.endswith(".json") else hashlib.sha256(content).hexdigest()
        )
        blob = folder / "blobs" / digest
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        os.utime(blob, (OLD, OLD))
        pointer = folder / "snapshots" / commit / name
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        pointers[name] = pointer
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return pointers


def ours() -> list[str]:
    return sorted(m.name for m in store.scan() if m.origin == "hf-cache")


# --- verify ---------------------------------------------------------------------------------------


def test_a_whole_model_is_ok_and_one_flipped_bit_is_not(tiny_model: Path) -> None:
    content = tiny_model.read_bytes()
    pointer = cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": content})["Tiny-Q8_0.gguf"]
    read: list[int] = []
    assert store.verify(resolve("tiny"), read.append).result == "ok"
    assert sum(read) == len(content)
    blob = pointer.resolve()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    checked = store.verify(resolve("tiny"))
    assert checked.result == "bad"
    assert "hash" in checked.detail


def test_an_mlx_folders_small_files_are_checked_too() -> None:
    files = {
        "config.json": b'{"quantization": {"bits": 4}}',
        "model.safetensors": safetensors(b"1"),
    }
    pointers = cached("mlx-community/Tiny-4bit", files)
    assert store.verify(resolve("tiny")).result == "ok"
    pointers["config.json"].resolve().write_bytes(b'{"quantization": {"bits": 8}}')
    assert store.verify(resolve("tiny")).result == "bad"


def test_a_file_without_a_published_hash_is_checked_against_its_header(
    tmp_path: Path, tiny_model: Path
) -> None:
    file = tmp_path / "Mine.gguf"
    file.write_bytes(tiny_model.read_bytes())
    assert store.verify(resolve(str(file))).result == "whole"
    file.write_bytes(tiny_model.read_bytes()[:-1000])
    assert store.verify(resolve(str(file))).result == "bad"
    file.write_bytes(b"GGUF, or so it says")
    assert store.verify(resolve(str(file))).result == "bad"


def test_the_starter_model_is_the_published_file(smollm2: Path) -> None:
    assert store.verify(resolve("starter")).result == "ok"
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == starter.SHA256


# --- rm -------------------------------------------------------------------------------------------


def test_removing_one_quant_leaves_the_other_and_frees_its_bytes() -> None:
    files = {
        "Tiny-Q4_K_M.gguf": b"GGUF" * 100,
        "Tiny-Q8_0.gguf": b"GGUF8" * 100,
        "mmproj-F16.gguf": b"GGUFproj",
    }
    pointers = cached("maker/Tiny-GGUF", files)
    assert store.rm(resolve("tiny:Q4_K_M")) == 400
    assert ours() == ["Tiny-Q8_0"]
    assert pointers["Tiny-Q8_0.gguf"].read_bytes() == files["Tiny-Q8_0.gguf"]
    assert pointers["mmproj-F16.gguf"].exists(), "the other still needs it"
    assert store.rm(resolve("tiny:Q8_0")) == 500 + 8
    assert not hf_cache.repo_folder(app_folders.hub_cache(), "maker/Tiny-GGUF").exists()


def test_removing_a_model_removes_it_from_every_snapshot() -> None:
    cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": b"GGUF old"}, "a" * 40)
    cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": b"GGUF newer"}, "c" * 40)
    assert store.rm(resolve("tiny")) == len(b"GGUF old") + len(b"GGUF newer")
    assert ours() == []


def test_removing_an_mlx_folder_removes_all_of_its_files() -> None:
    cached(
        "mlx-community/Tiny-4bit",
        {"config.json": b'{"quantization": {"bits": 4}}', "model.safetensors": safetensors(b"1")},
    )
    store.rm(resolve("tiny"))
    assert not list(app_folders.hub_cache().glob("models--*"))


def test_a_blob_that_two_names_share_stays_while_one_is_left() -> None:
    same = b"GGUF same"
    pointers = cached("maker/Tiny-GGUF", {"a/Tiny-Q8_0.gguf": same, "b/Other-Q8_0.gguf": same})
    assert store.rm(resolve("Tiny-Q8_0")) == 0
    assert pointers["b/Other-Q8_0.gguf"].read_bytes() == same


def test_removal_never_leaves_the_cache(tmp_path: Path) -> None:
    """Removal never leaves the cache.

    A snapshot's link may lead anywhere (it may come from another tool or an attacker). The link
    is removed, but its target stays.
    """
    outside = tmp_path / "precious.gguf"
    outside.write_bytes(b"GGUF precious")
    pointer = cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": b"GGUF" * 2})["Tiny-Q8_0.gguf"]
    pointer.unlink()
    pointer.symlink_to(outside)
    store.rm(resolve("tiny"))
    assert outside.read_bytes() == b"GGUF precious"


def test_the_starter_cannot_be_removed(smollm2: Path) -> None:
    with pytest.raises(UsageError):
        store.rm(resolve("starter"))
    assert smollm2.exists()


# --- prune ----------------------------------------------------------------------------------------


def test_prune_removes_only_unneeded_files() -> None:
    pointers = cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": b"GGUF" * 2})
    blobs = hf_cache.repo_folder(app_folders.hub_cache(), "maker/Tiny-GGUF") / "blobs"
    needless = {
        "1" * 64 + ".incomplete": "unfinished download",
        "2" * 64 + ".0a1b2c3d.incomplete": "unfinished download",
        "3" * 64 + ".downloadInProgress": "unfinished download",
        "4" * 64: "no snapshot uses it",
    }
    for name in needless:
        (blobs / name).write_bytes(b"12345")
        os.utime(blobs / name, (OLD, OLD))
    (blobs / ("5" * 64 + ".incomplete")).write_bytes(b"another process writes this now")
    (blobs / "README").write_bytes(b"not a blob of the hub's")
    found = store.waste()
    assert {w.path.name: w.why for w in found} == needless
    assert store.prune(found) == 4 * 5
    assert sorted(p.name for p in blobs.iterdir()) == sorted(
        ["5" * 64 + ".incomplete", "README", pointers["Tiny-Q8_0.gguf"].resolve().name]
    )
    assert store.waste() == []
    assert ours() == ["Tiny-Q8_0"]


def test_du_counts_each_file_once() -> None:
    cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": b"GGUF" * 250}, "a" * 40)
    cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": b"GGUF" * 250}, "c" * 40)
    (usage,) = [u for u in store.du() if u.origin == "hf-cache"]
    assert (usage.n_models, usage.size_bytes) == (1, 1000)


def test_malformed_caches_are_read_without_an_error(tmp_path: Path) -> None:
    cache = app_folders.hub_cache()
    for name in (
        "models--",
        "models--a",
        "models--..--..--x",
        "models--a--b/snapshots",
        "datasets--a--b",
        "models--c--d",
    ):
        (cache / name).mkdir(parents=True, exist_ok=True)
    (cache / "models--a--b" / "snapshots" / "not-a-commit").mkdir()
    (cache / "models--c--d" / "snapshots").write_bytes(b"a file")
    loop = cache / "models--e--f" / "snapshots" / ("a" * 40)
    loop.mkdir(parents=True)
    (loop / "self").symlink_to(loop)
    (loop / "x-Q8_0.gguf").symlink_to(loop / "x-Q8_0.gguf")
    assert ours() == []
    assert store.waste(now=time.time() + 3600)
    assert store.du() is not None


# --- the command ----------------------------------------------------------------------------------


def run(*arguments: str, input_text: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(models_command.app, list(arguments), input=input_text)
    if result.exception is not None and not isinstance(
        result.exception, (SystemExit, LocalLLMError)
    ):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_list_as_text_and_as_json(tiny_model: Path) -> None:
    pointer = cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": tiny_model.read_bytes()})[
        "Tiny-Q8_0.gguf"
    ]
    code, out, _ = run("list")
    assert code == 0
    assert "Tiny-Q8_0" in out
    assert "hf-cache" in out
    code, out, _ = run("list", "--json")
    row = next(m for m in json.loads(out)["models"] if m["name"] == "Tiny-Q8_0")
    assert (row["path"], row["bytes"], row["quant"], row["repo"]) == (
        str(pointer), tiny_model.stat().st_size, "Q8_0", "maker/Tiny-GGUF")  # fmt: skip
    assert run("--json") == (code, out, "")
    assert run()[1] == run("list")[1]


def test_verify_exits_with_4_when_a_file_is_bad(tiny_model: Path) -> None:
    pointer = cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": tiny_model.read_bytes()})[
        "Tiny-Q8_0.gguf"
    ]
    assert run("verify", "tiny")[0] == 0
    pointer.resolve().write_bytes(b"GGUF rotten")
    code, out, _ = run("verify", "tiny", "--json")
    assert code == 4
    assert json.loads(out)["models"][0]["result"] == "bad"


def test_rm_asks_for_confirmation_unless_yes_is_given() -> None:
    cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": b"GGUF" * 2})
    code, _, _ = run("rm", "tiny")
    assert code != 0, "nobody is there to ask"
    assert ours() == ["Tiny-Q8_0"]
    assert run("rm", "tiny", "--yes")[0] == 0
    assert ours() == []


def test_rm_refuses_a_name_that_matches_several_models() -> None:
    cached("maker/Tiny-GGUF", {"Tiny-Q4_K_M.gguf": b"GGUF" * 2, "Tiny-Q8_0.gguf": b"GGUF8" * 2})
    result = CliRunner().invoke(models_command.app, ["rm", "tiny", "--yes"])
    assert isinstance(result.exception, UsageError)
    assert "maker/Tiny-GGUF:Q4_K_M" in result.exception.hint
    assert len(ours()) == 2


def test_info_describes_installed_and_catalog_models(tiny_model: Path) -> None:
    cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": tiny_model.read_bytes()})
    code, out, _ = run("info", "tiny", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["local"]["name"] == "Tiny-Q8_0"
    assert facts["model"]["layers"] == 2
    code, out, _ = run("info", "qwen3-8b")
    assert code == 0
    assert "147,456 bytes of KV" in out
    assert "localllm pull qwen3-8b" in out


def test_prune_dry_run_removes_nothing() -> None:
    cached("maker/Tiny-GGUF", {"Tiny-Q8_0.gguf": b"GGUF" * 2})
    left = (
        hf_cache.repo_folder(app_folders.hub_cache(), "maker/Tiny-GGUF")
        / "blobs"
        / ("1" * 64 + ".incomplete")
    )
    left.write_bytes(b"12345")
    os.utime(left, (OLD, OLD))
    assert run("prune", "--dry-run")[0] == 0
    assert left.exists()
    code, out, _ = run("prune", "--yes", "--json")
    assert (code, json.loads(out)["freed_bytes"]) == (0, 5)
    assert not left.exists()


def test_adopt_and_forget(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "Mine-Q8_0.gguf").write_bytes(tiny_model.read_bytes())
    code, out, _ = run("adopt", str(tmp_path / "mine"))
    assert code == 0
    assert "Mine-Q8_0" in out
    assert "Mine-Q8_0" in run("list")[1]
    code, _, err = run("adopt", str(tmp_path / "mine"), "--forget")
    assert (code, err) == (0, f"{tmp_path / 'mine'} is no longer used; its files stay\n")
    assert "Mine-Q8_0" not in run("list")[1]
