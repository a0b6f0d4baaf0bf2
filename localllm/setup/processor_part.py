"""Replace the CPU library of a ready-made build with that of the build compiled here.

Ready-made wheels are built without OpenMP on Linux, ROCm's without AVX, and CUDA's for the
processor that compiled them. The CPU library computes experts or layers in system memory. ggml
keeps it in a library of its own, so it can come from another build of the same version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_REPLACED_FOLDER = "ready-made"


def exchange(package: Path, own_package: Path) -> bool:
    """Replace `package`'s CPU library with `own_package`'s, and keep the replaced files.

    Both are folders llama_cpp. If their versions of ggml differ, the function returns False and
    changes no files.
    """
    replaced_files = _libraries(package, "ggml-cpu")
    own_files = _libraries(own_package, "ggml-cpu")
    versions = [_names(_libraries(folder, "ggml-base")) for folder in (package, own_package)]
    if (
        not replaced_files
        or _names(replaced_files) != _names(own_files)
        or versions[0] != versions[1]
    ):
        return False
    kept_folder = package / "lib" / _REPLACED_FOLDER
    kept_folder.mkdir()
    for replaced_file, own_file in zip(replaced_files, own_files, strict=True):
        replaced_file.rename(kept_folder / replaced_file.name)
        shutil.copy(own_file, replaced_file)
    return True


def put_back(package: Path) -> None:
    """Undo `exchange`."""
    kept_folder = package / "lib" / _REPLACED_FOLDER
    for file in sorted(kept_folder.iterdir()):
        file.replace(package / "lib" / file.name)
    kept_folder.rmdir()


def _libraries(package: Path, name: str) -> list[Path]:
    """Return the files of a library on any system, with or without a version in their names."""
    folder = package / "lib"
    files = [
        *folder.glob(f"lib{name}.so*"),
        *folder.glob(f"lib{name}*.dylib"),
        *folder.glob(f"{name}.dll"),
    ]
    return sorted(file for file in files if file.is_file())


def _names(files: list[Path]) -> list[str]:
    return [file.name for file in files]
