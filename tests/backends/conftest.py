"""Tiny MLX checkpoints for every kind of memory, each written once, and backends loaded from them
that are checked and closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm_backends.contract import LoadSpec
from localllm_backends.mlx import backend_type
from models import tiny_mlx


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("mlx")

    def written(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else tiny_mlx.SHAPES[name](folder)

    return written


@pytest.fixture
def load(checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def loaded(name: str = "llama", **spec: Any) -> Any:
        spec = {"n_ctx": 1024, "n_seq_max": 6, "n_batch": 64, **spec}
        made.append(backend_type.load(LoadSpec(str(checkpoint(name)), **spec)))
        return made[-1]

    yield loaded
    for backend in made:
        backend.check_integrity()
        backend.close()
