"""The cached parse of the shipped tables.

The models are the same with and without it, and a stale or damaged cache is never used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm import paths
from localllm.library.catalog import load_catalog
from localllm_catalog import catalog
from localllm_catalog.errors import BadCatalogError


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """Return a counter of how often the shipped tables (a copy in `tmp_path`) were parsed."""
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(paths, "config_dir", lambda: tmp_path / "config")
    (tmp_path / "config" / "models").mkdir(parents=True)
    shutil.copytree(catalog.FAMILIES_DIR, tmp_path / "families")
    monkeypatch.setattr(catalog, "FAMILIES_DIR", tmp_path / "families")
    seen: list[None] = []
    shipped = catalog.shipped

    def counted() -> catalog.Documents:
        seen.append(None)
        return shipped()

    monkeypatch.setattr(catalog, "shipped", counted)
    return lambda: len(seen)


def test_models_are_equal_with_and_without_the_cached_parse(parses: Callable[[], int]) -> None:
    first, again = load_catalog(), load_catalog()
    assert parses() == 1
    assert first.models == again.models == catalog.load().models


def test_a_changed_file_is_parsed_again(parses: Callable[[], int], tmp_path: Path) -> None:
    load_catalog()
    file = tmp_path / "families" / "qwen3.toml"
    file.write_text(file.read_text().replace('"qwen3-8b"', '"qwen3-8b-renamed"'))
    os.utime(file, ns=(1, 1))
    assert load_catalog().get("qwen3-8b-renamed") is not None
    assert parses() == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"stamp": 1}', "null"])
def test_a_damaged_cache_is_rebuilt(parses: Callable[[], int], tmp_path: Path, damage: str) -> None:
    kept = tmp_path / "cache" / "catalog.json"
    kept.parent.mkdir()
    kept.write_text(damage)
    assert load_catalog().models
    assert parses() == 1
    assert "qwen3.toml" in json.loads(kept.read_text())["value"]


def test_a_parse_that_cannot_be_cached_is_used(parses: Callable[[], int], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert load_catalog().models
    assert load_catalog().models
    assert parses() == 2


def test_a_missing_catalog_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(catalog, "SOURCES_FILE", tmp_path / "sources.toml")
    with pytest.raises(BadCatalogError, match="sources"):
        catalog.read_sources()
