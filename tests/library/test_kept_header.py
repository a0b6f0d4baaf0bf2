"""The cached position in a GGUF header where the vocabulary ends.

The header is the same with and without it, and an old or damaged cache is never used.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from localllm import paths
from localllm.library.catalog import read_header
from localllm_catalog import gguf
from localllm_catalog.byte_sources import FileSource


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "string-arrays.json"


def test_a_second_reading_leaves_the_vocabulary_out(smollm2: Path) -> None:
    read_bytes = [0]

    class Counting(FileSource):
        chunk = 4096

        def read(self, offset: int, length: int) -> bytes:
            read_bytes[-1] += length
            return super().read(offset, length)

    ends: dict[int, int] = {}
    first = gguf.read(smollm2, Counting, ends)
    read_bytes.append(0)
    assert gguf.read(smollm2, Counting, ends) == first
    assert read_bytes[1] < 0.1 * read_bytes[0]


def test_a_header_is_equal_with_and_without_the_cache(smollm2: Path, cache: Path) -> None:
    assert read_header(smollm2) == read_header(smollm2) == gguf.read(smollm2)
    assert cache.exists()


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"KEY": 1}', '{"KEY": [[1]]}', '{"KEY": [["a", 2]]}']
)
def test_a_damaged_cache_file_is_rewritten(smollm2: Path, cache: Path, damage: str) -> None:
    stat = smollm2.stat()
    key = f"{os.path.realpath(smollm2)}|{stat.st_size}|{stat.st_mtime_ns}"
    cache.parent.mkdir()
    cache.write_text(damage.replace("KEY", key))
    assert read_header(smollm2) == gguf.read(smollm2)
    assert cache.read_text() != damage


def test_a_replaced_file_of_the_same_name_is_read_again(
    smollm2: Path, few_layers: Path, cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    shutil.copyfile(smollm2, file)
    read_header(file)
    shutil.copyfile(few_layers, file)
    assert read_header(file).tensors == gguf.read(few_layers).tensors
