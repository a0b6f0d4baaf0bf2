"""The processor's part of a ready-made build, exchanged for that of the build which was compiled
here.

Ready-made wheels are built without OpenMP on Linux, ROCm's without AVX, CUDA's for whatever
processor compiled them: where experts or layers lie in system memory, that part computes them. ggml
keeps it in a library of its own, so it can be another's of the same version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_ASIDE = "ready-made"


def exchange(package: Path, own: Path) -> bool:
    """Put `own`'s part in the place of `package`'s (both a folder llama_cpp), whose files stand
    aside. False, and nothing done, where they are not of one version of ggml."""
    theirs = _libraries(package, "ggml-cpu")
    ours = _libraries(own, "ggml-cpu")
    versions = [_names(_libraries(folder, "ggml-base")) for folder in (package, own)]
    if not theirs or _names(theirs) != _names(ours) or versions[0] != versions[1]:
        return False
    aside = package / "lib" / _ASIDE
    aside.mkdir()
    for old, new in zip(theirs, ours, strict=True):
        old.rename(aside / old.name)
        shutil.copy(new, old)
    return True


def put_back(package: Path) -> None:
    """Undo `exchange`."""
    aside = package / "lib" / _ASIDE
    for file in sorted(aside.iterdir()):
        file.replace(package / "lib" / file.name)
    aside.rmdir()


def _libraries(package: Path, name: str) -> list[Path]:
    """Its files, whatever the system and whether or not the version is in their names."""
    folder = package / "lib"
    found = [
        *folder.glob(f"lib{name}.so*"),
        *folder.glob(f"lib{name}*.dylib"),
        *folder.glob(f"{name}.dll"),
    ]
    return sorted(file for file in found if file.is_file())


def _names(files: list[Path]) -> list[str]:
    return [file.name for file in files]
