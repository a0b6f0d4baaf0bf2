"""Versions and entry points equal those that importlib.metadata finds."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from localllm_backends.installed_packages import entry_points, version


def test_versions_are_those_of_the_packages_metadata() -> None:
    for package in ("llama-cpp-python", "llama_cpp_python", "numpy", "Pytest"):
        assert version(package) == importlib.metadata.version(package)
    assert version("no-such-package") is None


@pytest.mark.parametrize("group", ["localllm.backends", "console_scripts", "pytest11"])
def test_entry_points_are_those_of_the_packages_metadata(group: str) -> None:
    theirs = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    assert entry_points(group).keys() == theirs.keys() != set()
    for name in ("llamacpp", "localllm", "timeout"):
        assert entry_points(group).get(name) == theirs.get(name)


def test_the_first_package_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, release in (("first", "2.0"), ("second", "1.0")):
        made = tmp_path / folder / f"our_thing-{release}.dist-info"
        made.mkdir(parents=True)
        lines = ["[other]", "a = b:c", "", "[ours]", f"thing = {folder}:main [extra]", "# no"]
        (made / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert version("our-thing") == "2.0"
    assert entry_points("ours") == {"thing": "first:main"}
    assert entry_points("none") == {}
