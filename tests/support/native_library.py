"""Libraries compiled from a few lines of C, which replace llama.cpp's or are loaded before it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from localllm_backends.llamacpp.binding.engine_files import headers_for, library_folder

COMPILER = shutil.which("cc")


def include_folder() -> Path:
    """Return the headers of the llama.cpp that the tests run with."""
    folder = library_folder()
    assert folder is not None
    return headers_for(folder)[0].parent


def compile_library(
    source: str, to: Path, *, linked: tuple[Path, ...] = (), include: Path | None = None
) -> None:
    """Compile C code to the shared library `to`, linked with others in the folder of `to`."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    code = to.with_name(f"{to.name}.c")
    code.write_text(source)
    made = to.with_name(f"{to.name}.made")
    subprocess.run(
        [
            COMPILER, "-shared", "-fPIC", "-D_GNU_SOURCE", "-w", "-o", str(made), str(code),
            f"-I{include or include_folder()}", "-Wl,--no-as-needed",
            *map(str, linked), "-Wl,-rpath,$ORIGIN", "-ldl",
        ],
        check=True,
    )  # fmt: skip
    code.unlink()
    to.unlink(missing_ok=True)
    made.rename(to)


def put_in_front(package: Path, source: str) -> None:
    """Replace functions of a package's libllama by those in `source`."""
    library = package / "lib" / "libllama.so"
    compile_library(source, library, linked=(package / "lib" / "libllama.so.0",))
