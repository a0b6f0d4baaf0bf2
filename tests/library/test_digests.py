"""A model's digest is the hash of its files: known where it was published, else read once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from localllm.library import digests, starter, store
from localllm.library.digests import ModelDigest
from localllm.library.types import LocalModel


def _local(*files: Path, origin: str = "path") -> LocalModel:
    return LocalModel(
        "m", files[0], "gguf", sum(f.stat().st_size for f in files), "Q4_K_M", origin, files=files
    )  # type: ignore[arg-type]


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read whole."""
    seen: list[Path] = []
    real = store.digest_file

    def counting(file: Path, *args: object) -> str:
        seen.append(file)
        return real(file, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "digest_file", counting)
    return seen


def test_an_unpublished_file_is_read_once_in_the_background(
    tmp_path: Path, reads: list[Path]
) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"weights")
    digest = ModelDigest(_local(file))
    at_once = digest()
    assert len(at_once) == 64
    digest.wait()
    assert digest() == _sha256(b"weights") == ModelDigest(_local(file))()
    assert reads == [file], "another process would find it remembered, too"


def test_a_changed_file_has_another(tmp_path: Path, reads: list[Path]) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"weights")
    ModelDigest(_local(file)).read()
    file.write_bytes(b"others!")
    os.utime(file, ns=(1, 1))
    digest = ModelDigest(_local(file))
    digest.read()
    assert digest() == _sha256(b"others!")
    assert len(reads) == 2


def test_several_files_have_the_hash_of_their_hashes(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, part in enumerate(parts):
        part.write_bytes(bytes([i]))
    digest = ModelDigest(_local(*parts))
    digest.read()
    lines = "".join(f"{_sha256(bytes([i]))}  {part.name}\n" for i, part in enumerate(parts))
    assert digest() == _sha256(lines.encode())


def test_published_files_are_not_read(tmp_path: Path, smollm2: Path, reads: list[Path]) -> None:
    assert ModelDigest(_local(smollm2, origin="starter"))() == starter.SHA256
    blob = tmp_path / "blobs" / _sha256(b"x")
    blob.parent.mkdir()
    blob.write_bytes(b"x")
    pointer = tmp_path / "m.gguf"
    pointer.symlink_to(blob)
    assert ModelDigest(_local(pointer, origin="hf-cache"))() == _sha256(b"x")
    assert reads == []


def test_a_file_that_is_gone_has_digits_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"weights")
    model = _local(file)
    file.unlink()
    digest = ModelDigest(model)
    assert len(digest()) == 64
    digest.wait()
    assert len(digest()) == 64


def test_a_broken_memory_is_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"weights")
    ModelDigest(_local(file)).read()
    digests.kept_in().write_text("{broken", encoding="utf-8")
    digest = ModelDigest(_local(file))
    digest.read()
    assert digest() == _sha256(b"weights")
