"""One registry of backends: the planner and the command line need only an entry point's
declaration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from localllm import settings
from localllm.device.name_lookup import resolve
from localllm.engine.worker import backends
from localllm.errors import UsageError
from localllm.planner import recommend
from localllm.planner.plan import plan_for
from localllm.planner.starting_settings import Overrides
from localllm.planner.types import Workload
from localllm_backends import registry
from localllm_backends.backend_type import BackendType
from localllm_backends.contract import Declaration, LoadSpec
from localllm_catalog import catalog


class Third(BackendType):
    """A third-party backend: it declares itself, and no other code here refers to it."""

    declaration = Declaration(
        "third", "Third", ("exl",), files="EXL folders", accelerators=("cuda",), packages=("x",)
    )

    def available(self) -> str | None:
        return None

    def accepts(self, path: str) -> bool:
        return False

    def vocabulary(self, path: str) -> list[bytes]:
        return []

    def load(self, spec: LoadSpec, on_progress: object = None) -> Any:
        raise NotImplementedError


@pytest.fixture
def third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of Third is installed."""
    metadata = tmp_path / "third-1.0.dist-info"
    metadata.mkdir()
    text = "[localllm.backends]\nthird = third_package:backend_type\n"
    (metadata / "entry_points.txt").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    package = SimpleNamespace(backend_type=Third())
    monkeypatch.setitem(sys.modules, "third_package", cast("ModuleType", package))
    forget()
    yield
    monkeypatch.undo()
    forget()


def forget() -> None:
    for known in (
        registry.backends,
        registry.declarations,
        registry.declared,
        registry.running,
    ):
        known.cache_clear()


def test_each_backend_is_declared_under_the_name_of_its_entry_point() -> None:
    names = [declared.name for declared in registry.declarations()]
    assert names == list(registry.backends()) == ["llamacpp", "mlx"]
    assert [registry.running(kind).name for kind in ("gguf", "mlx", "onnx")] == [
        "llamacpp",
        "mlx",
        "",
    ]
    with pytest.raises(UsageError, match="there is no backend 'vllm'"):
        backends.named("vllm")


def test_reading_declarations_loads_no_engine() -> None:
    code = (
        "from localllm_backends import registry; registry.declarations(); import sys; "
        "print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"llama_cpp", "mlx", "mlx_lm", "numpy"} & set(loaded)


@pytest.mark.usefixtures("third")
def test_a_third_party_backend_needs_only_its_entry_point() -> None:
    """Settings offer it, its files are planned for the machines that it names, and the worker finds
    it by name."""
    assert settings.setting("backend").allowed == ("auto", "llamacpp", "mlx", "third")
    assert backends.named("third").declaration.label == "Third"
    device, model = resolve("RTX 4090"), catalog.load().by_id["qwen3-8b"]
    assert recommend.backends_of(device) == ("llamacpp", "third")
    assert recommend.backends_of(resolve("M4 Max 64GB")) == ("llamacpp", "mlx")
    gguf = next(v for v in model.variants if v.quant == "Q4_K_M")
    theirs = replace(gguf, format="exl")  # type: ignore[arg-type]
    plan = plan_for(device, model, theirs, Workload(), overrides=Overrides())
    assert (plan.backend, plan.fits) == ("third", "yes")
    assert plan.settings.spare == plan.settings.n_rewind == 0
