"""The changes that compiler_faults.cmake makes to a build of llama.cpp, with this machine's
compiler."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.setup.host import BuildHost
from localllm.setup.steps import COMPILER_FAULTS, from_source

# Load a tile configuration as ggml does. The number of rows is the 48th of its 64 bytes.
_TILES = """
#include <immintrin.h>
void load() {
    alignas(64) unsigned char config[64] = {};
    config[0] = 1;
    config[48] = 119;
    _tile_loadconfig(config);
}
"""
_PROJECT = """
cmake_minimum_required(VERSION 3.14)
project(llama_cpp CXX)
add_library(probe STATIC probe.cpp)
target_compile_options(probe PRIVATE -march=sapphirerapids)
"""
_PROBE = """
#ifdef __AMX_TILE__
#error "this build has AMX"
#endif
"""
needs_gcc = pytest.mark.skipif(
    shutil.which("g++") is None
    or shutil.which("cmake") is None
    or platform.machine() not in ("x86_64", "AMD64"),
    reason="needs g++ and cmake on x86-64",
)


def compiles_amx_right(folder: Path) -> bool:
    """Return whether g++ stores the whole tile configuration before it is loaded."""
    (folder / "tiles.cpp").write_text(_TILES)
    done = subprocess.run(
        ["g++", "-O2", "-mamx-tile", "-S", "-o", "-", "tiles.cpp"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return re.search(r"\$119\b", done.stdout) is not None


@needs_gcc
def test_a_build_uses_amx_only_if_the_compiler_handles_it_correctly(tmp_path: Path) -> None:
    right = compiles_amx_right(tmp_path)
    (tmp_path / "CMakeLists.txt").write_text(_PROJECT)
    (tmp_path / "probe.cpp").write_text(_PROBE)
    configured = subprocess.run(
        ["cmake", "-S", ".", "-B", "build", "-DCMAKE_CXX_COMPILER=g++",
         f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={COMPILER_FAULTS}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert configured.returncode == 0, configured.stderr
    built = subprocess.run(
        ["cmake", "--build", "build"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ("this build has AMX" in built.stderr + built.stdout) == right
    assert ("building without AMX" in configured.stdout) != right


def test_a_compilation_applies_the_list_of_gcc_faults() -> None:
    host = BuildHost("linux", "x86_64", "0.3.36", 8)
    for gcc, read in ((None, False), (10, False), (12, True), (13, True), (14, False)):
        flags = dict(from_source(replace(host, gcc=gcc), ["-DGGML_VULKAN=ON"]).environment)
        assert (str(COMPILER_FAULTS) in flags["CMAKE_ARGS"]) == read
