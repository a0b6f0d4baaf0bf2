"""Replace the CPU library of a ready-made build with that of the build compiled here.

Ready-made wheels are built without OpenMP on Linux, ROCm's without AVX, and CUDA's for the
processor that compiled them. The CPU library computes experts or layers in system memory. ggml
keeps it in a library of its own, so it can come from another build of the same version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_REPLACED_FOLDER = "ready-made"


def exchange(package: Path, own: Path) -> bool:
    """Replace `package`'s CPU library with `own`'s, and keep the replaced files.

    Both are folders llama_cpp. If their versions of ggml differ, the function returns False and
    changes no files.
    """
    theirs = _libraries(package, "ggml-cpu")
    ours = _libraries(own, "ggml-cpu")
    versions = [_names(_libraries(folder, "ggml-base")) for folder in (package, own)]
    if not theirs or _names(theirs) != _names(ours) or versions[0] != versions[1]:
        return False
    replaced = package / "lib" / _REPLACED_FOLDER
    replaced.mkdir()
    for old, new in zip(theirs, ours, strict=True):
        old.rename(replaced / old.name)
        shutil.copy(new, old)
    return True


def put_back(package: Path) -> None:
    """Undo `exchange`."""
    replaced = package / "lib" / _REPLACED_FOLDER
    for file in sorted(replaced.iterdir()):
        file.replace(package / "lib" / file.name)
    replaced.rmdir()


def _libraries(package: Path, name: str) -> list[Path]:
    """Return the files of a library on any system, with or without a version in their names."""
    folder = package / "lib"
    found = [
        *folder.glob(f"lib{name}.so*"),
        *folder.glob(f"lib{name}*.dylib"),
        *folder.glob(f"{name}.dll"),
    ]
    return sorted(file for file in found if file.is_file())


def _names(files: list[Path]) -> list[str]:
    return [file.name for file in files]
