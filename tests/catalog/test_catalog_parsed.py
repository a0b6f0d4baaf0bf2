"""The kept parse of the shipped tables: the same models with it as without, and never a stale or
broken one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localllm_catalog import catalog
from localllm_catalog.errors import BadCatalogError


def test_models_are_equal_with_and_without_the_kept_parse(tmp_path: Path) -> None:
    kept = tmp_path / "deep" / "catalog.json"
    first = catalog.load(cache=kept)
    assert kept.exists()
    again = catalog.load(cache=kept)
    assert first.models == again.models == catalog.load().models


def counted(seen: list[Path]) -> Any:
    def parse(file: Path) -> dict[str, Any]:
        seen.append(file)
        return {"text": file.read_text()}

    return parse


def test_a_changed_file_is_parsed_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    file, kept, seen = tmp_path / "a.toml", tmp_path / "kept.json", list[Path]()
    file.write_text("one")
    for _ in range(3):
        assert catalog.read_all([file], counted(seen), kept) == {"a.toml": {"text": "one"}}
    assert len(seen) == 1
    file.write_text("two")
    os.utime(file, ns=(1, 1))
    assert catalog.read_all([file], counted(seen), kept) == {"a.toml": {"text": "two"}}
    assert len(seen) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"stamp": 1}', "null"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, damage: str) -> None:
    file, kept = tmp_path / "a.toml", tmp_path / "kept.json"
    file.write_text("one")
    kept.write_text(damage)
    assert catalog.read_all([file], counted([]), kept) == {"a.toml": {"text": "one"}}
    assert json.loads(kept.read_text())["documents"] == {"a.toml": {"text": "one"}}


def test_without_a_place_to_keep_it_the_parse_is_used_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("one")
    assert catalog.read_all([file], counted([]), file / "below" / "a-file.json") == {
        "a.toml": {"text": "one"}
    }


def test_a_missing_file_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadCatalogError, match="sources"):
        catalog.read_sources(tmp_path / "sources.toml")
