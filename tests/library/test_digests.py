"""A model's digest is the hash of its files as published, found without reading them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from localllm.library import digests, starter
from localllm.library.digests import model_digest
from localllm.library.types import LocalModel


def _local(*files: Path, origin: str = "path") -> LocalModel:
    return LocalModel(
        "m", files[0], "gguf", sum(f.stat().st_size for f in files), "Q4_K_M", origin, files=files
    )  # type: ignore[arg-type]


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def test_an_unpublished_file_keeps_its_own_digest_until_it_changes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"weights")
    model = _local(file)
    before = model_digest(model)
    assert len(before) == 64
    assert model_digest(model) == before
    os.utime(file, ns=(1, 1))
    changed = model_digest(model)
    file.unlink()
    gone = model_digest(model)
    assert len({before, changed, gone}) == 3
    assert len(gone) == 64


def _published(folder: Path, name: str, content: bytes) -> Path:
    """Write a file like the hub's cache: a link to a blob named by its hash."""
    blob = folder / "blobs" / _sha256(content)
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(content)
    pointer = folder / name
    pointer.symlink_to(blob)
    return pointer


def test_a_published_file_has_its_hash(tmp_path: Path, smollm2: Path) -> None:
    assert model_digest(_local(smollm2, origin="starter")) == starter.SHA256
    pointer = _published(tmp_path, "m.gguf", b"x")
    assert model_digest(_local(pointer, origin="hf-cache")) == _sha256(b"x")


def test_several_files_have_the_hash_of_their_hashes(tmp_path: Path) -> None:
    names = [f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    parts = [_published(tmp_path, name, name.encode()) for name in names]
    lines = "".join(f"{_sha256(name.encode())}  {name}\n" for name in names)
    assert model_digest(_local(*parts, origin="hf-cache")) == _sha256(lines.encode())


def test_a_computed_hash_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"weights")
    digests.kept.path.parent.mkdir(parents=True, exist_ok=True)
    digests.kept.path.write_text("{broken", encoding="utf-8")
    assert not digests.is_known(file, _sha256(b"weights"))
    digests.remember(file, _sha256(b"weights"))
    assert digests.is_known(file, _sha256(b"weights"))
    os.utime(file, ns=(1, 1))
    assert not digests.is_known(file, _sha256(b"weights"))
