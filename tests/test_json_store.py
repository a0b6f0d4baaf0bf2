"""Our JSON files: an unreadable file counts as missing, and writes are atomic and private."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from localllm import json_store


@dataclass(frozen=True)
class Figure:
    name: str
    speed: float
    devices: tuple[str, ...] = ()


def test_written_records_are_read_as_their_dataclass(tmp_path: Path) -> None:
    file, figure = tmp_path / "new" / "figure.json", Figure("chip", 3.5, ("gpu",))
    json_store.write(file, asdict(figure))
    assert json_store.record(Figure, json_store.read(file)) == figure
    assert [f.name for f in file.parent.iterdir()] == ["figure.json"]
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000, None]
)
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "figures.json"
    if content is not None:
        file.write_bytes(content)
    assert json_store.read(file) == {}


@pytest.mark.parametrize("content", ["", "7", "[7]", "{}", '{"runs": 7}', '{"runs": {"a": 7}}'])
def test_a_file_without_the_list_has_no_entries(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    assert json_store.entries(file, "runs") == []
    file.write_text('{"runs": [7]}')
    assert json_store.entries(file, "runs") == [7]


def test_a_file_beyond_the_size_limit_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    json_store.write(file, {"a": 1})
    with pytest.raises(OSError, match="larger than 4 bytes"):
        json_store.load(file, 4)


@pytest.mark.parametrize(
    "entry",
    [None, [], {}, {"name": "chip"}, {"name": 1, "speed": 2.0}, {"name": "x", "speed": "2"}],
)
def test_entries_of_another_shape_are_ignored(entry: object) -> None:
    assert json_store.record(Figure, entry) is None


def test_unknown_fields_of_later_versions_are_left_out() -> None:
    assert json_store.record(Figure, {"name": "chip", "speed": 2, "later": 1}) == Figure("chip", 2)


def test_a_failed_write_is_ignored_if_the_file_can_be_recreated(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    json_store.keep(blocked / "figures.json", {})
    with pytest.raises((FileExistsError, NotADirectoryError)):
        json_store.write(blocked / "figures.json", {})


@pytest.fixture
def derive(tmp_path: Path) -> Callable[[], list[str]]:
    """Return a function that reads a file's lines from a cache, with the number of reads as last
    line."""
    source = tmp_path / "source"
    source.write_text("a\nb")
    readings: list[str] = []

    def lines() -> list[str]:
        readings.append("read")
        return [*source.read_text().splitlines(), str(len(readings))]

    def kept() -> list[str]:
        found: list[str] = json_store.derived(tmp_path / "cache" / "kept.json", [source], lines)
        return found

    return kept


def test_a_derived_value_is_computed_once(derive: Callable[[], list[str]]) -> None:
    assert derive() == derive() == ["a", "b", "1"]


def test_a_derived_value_follows_its_source(
    derive: Callable[[], list[str]], tmp_path: Path
) -> None:
    derive()
    (tmp_path / "source").write_text("c")
    assert derive() == ["c", "2"]


def test_a_derived_value_of_another_version_is_not_used(
    derive: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    derive()
    monkeypatch.setattr(json_store, "__version__", "another")
    assert derive() == ["a", "b", "2"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"stamp": 1}', "null"])
def test_a_damaged_derived_value_is_computed_again(
    derive: Callable[[], list[str]], tmp_path: Path, damage: str
) -> None:
    derive()
    (tmp_path / "cache" / "kept.json").write_text(damage)
    assert derive() == ["a", "b", "2"]


def test_a_derived_value_works_without_a_writable_folder(
    derive: Callable[[], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert derive() == ["a", "b", "1"]
    assert derive() == ["a", "b", "2"]
