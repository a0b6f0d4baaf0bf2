"""The build tools of a machine are read from its programs and libraries: stubs that answer as the
real ones do."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest

from localllm.setup import host

NVCC = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Tue_May_27_02:21:03_PDT_2025
Cuda compilation tools, release 12.9, V12.9.86
Build cuda_12.9.r12.9/compiler.36037853_0"""


def program(folder: Path, name: str, says: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    (folder / name).chmod(0o755)


def test_compiler_versions_are_read_from_the_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "nvcc", NVCC)
    program(tmp_path, "g++", "15")
    program(tmp_path, "g++-14", "14.3.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("NVCC_CCBIN", raising=False)
    here = host.read(("cuda",))
    assert (here.nvcc, here.nvcc_path) == ((12, 9), str(tmp_path / "nvcc"))
    assert (here.gcc, here.cxx) == (15, True)
    # The compiler that nvcc is told to use counts: Arch sets an older one.
    monkeypatch.setenv("NVCC_CCBIN", str(tmp_path / "g++-14"))
    assert host.read(("cuda",)).gcc == 14


def test_cuda_libraries_are_found_only_next_to_their_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    program(tmp_path / "cuda" / "bin", "nvcc", NVCC)
    monkeypatch.setenv("PATH", f"{tmp_path / 'cuda' / 'bin'}:/usr/bin:/bin")
    assert host.read(()).cuda_libraries == ""
    folder = tmp_path / "cuda" / "lib64"
    folder.mkdir()
    for name in ("libcudart.so.12", "libcublas.so.12"):
        (folder / name).write_text("")
    assert host.read(()).cuda_libraries == str(folder)
    # Debian has a link in /usr/bin.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(tmp_path / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert host.read(()).cuda_libraries == str(folder)


def test_the_c_library_version_is_that_of_this_system() -> None:
    found = host.read(()).glibc
    assert found is None or found >= (2, 17)


@pytest.mark.parametrize(
    ("library", "version"),
    [
        ("libamdhip64.so.7", (7, 0)),
        ("libamdhip64.so.6", (6, 0)),
        ("libamdhip64.so", None),
        (None, None),
    ],
)
def test_the_rocm_version_is_read_from_its_library_name(
    library: str | None, version: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ctypes.util, "find_library", lambda name: library if name == "amdhip64" else None
    )
    assert host.read(()).rocm == version
