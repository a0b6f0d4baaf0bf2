"""The list of names that we use from mlx-lm and mlx-vlm is complete, and the installed releases
have all of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm_backends import mlx
from localllm_backends.mlx import backend_type, library_names

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]
LIBRARIES = ("mlx_lm", "mlx_vlm")


def imported() -> Iterator[str]:
    """Names that the package imports from the two libraries, `module.name`."""
    for file in Path(mlx.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_imported_name_is_in_the_list() -> None:
    listed = {name.partition("(")[0] for names in library_names.names().values() for name in names}
    # A module is listed together with its names.
    modules = {name.rpartition(".")[0] for name in listed}
    assert set(imported()) <= listed | modules


def test_the_installed_releases_have_every_name() -> None:
    assert library_names.missing_names() == {}


def test_a_removed_name_is_reported_with_its_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mlx_lm.utils.load_adapters")
    monkeypatch.setattr("mlx_lm.utils.load_model", lambda folder, lazy=False: None)
    monkeypatch.setitem(sys.modules, "mlx_lm.convert", SimpleNamespace())
    assert library_names.missing_names() == {
        "LoRA adapters": ["mlx_lm.utils.load_adapters"],
        "quants": ["mlx_lm.convert.convert"],
        "draft heads": ["mlx_lm.utils.load_model(get_model_classes)"],
    }
