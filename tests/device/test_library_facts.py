"""The architectures and the version of a llama.cpp library, read from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.device.library_facts import Architectures, architectures_of, library_in, version_in
from localllm.device.probes import llama_cpp_folder
from localllm.load.engine_title import engine_title
from localllm_backends import registry
from localllm_catalog.catalog import Catalog
from localllm_catalog.catalog import load as load_catalog


@pytest.fixture(scope="module")
def installed() -> Architectures:
    folder = llama_cpp_folder()
    assert folder is not None
    library = library_in(folder)
    assert library is not None
    known = architectures_of(library)
    assert known is not None
    return known


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def test_the_table_of_the_installed_library_is_found(installed: Architectures) -> None:
    assert len(installed.listed) > 100
    assert {"llama", "qwen3", "gemma3", "gpt-oss", "lfm2"} <= installed.listed


@pytest.mark.parametrize("name", ["bert", "qwen2", "rwkv7", "glm4", "llama", "clip"])
def test_a_name_that_the_linker_stored_in_a_longer_one_is_found(
    name: str, installed: Architectures
) -> None:
    assert installed.has(name)


@pytest.mark.parametrize("name", ["lfm3", "xing4_0", "kimi-k9", "no-such-architecture"])
def test_an_architecture_that_the_library_does_not_have_is_not_found(
    name: str, installed: Architectures
) -> None:
    assert not installed.has(name)


def test_every_architecture_of_the_catalog_is_in_the_wheel(
    installed: Architectures, catalog: Catalog
) -> None:
    """A catalog model may need a newer llama.cpp only if FIRST_RELEASES names it."""
    named = {model.gguf_architecture for model in catalog.models} - {""}
    assert len(named) >= 5
    assert {name for name in named if not installed.has(name)} == set()


@pytest.mark.parametrize("data", [b"", b"\0clip\0llama\0", b"\0clip\0" + b"x" * 100_000])
def test_without_a_table_every_architecture_is_tried(data: bytes) -> None:
    known = Architectures(data)
    assert known.listed == frozenset()
    assert known.has("lfm3")


def test_an_unusual_architecture_name_is_not_rejected_before_loading(
    installed: Architectures,
) -> None:
    assert installed.has("UPPER CASE")
    assert installed.has("")


def test_the_version_is_read_from_the_names_of_the_files(tmp_path: Path) -> None:
    folder = llama_cpp_folder()
    assert folder is not None
    assert version_in(folder) == "0.5.0"
    assert version_in(tmp_path) == ""
    (tmp_path / "libllama.1.0.2.dylib").write_bytes(b"")
    (tmp_path / "libllama.dylib").symlink_to("libllama.1.0.2.dylib")
    assert version_in(tmp_path) == "1.0.2"
    assert architectures_of(tmp_path / "missing.so") is None


def test_a_library_with_a_version_in_its_name_is_found(tmp_path: Path) -> None:
    assert library_in(tmp_path) is None
    (tmp_path / "libllama-common.so.0").write_bytes(b"")
    assert library_in(tmp_path) is None
    (tmp_path / "libllama.so.0.5.0").write_bytes(b"")
    (tmp_path / "libllama.so.0").symlink_to("libllama.so.0.5.0")
    assert library_in(tmp_path) == tmp_path / "libllama.so.0"
    assert version_in(tmp_path) == "0.5.0"


def test_an_engine_is_named_with_the_release_of_the_library_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_cpp = registry.declared("llamacpp")
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    assert engine_title(llama_cpp).startswith("llama.cpp (llama-cpp-python 0.")
    (tmp_path / "libllama.so.1.0.0").write_bytes(b"")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert engine_title(llama_cpp) == "llama.cpp 1.0.0"
