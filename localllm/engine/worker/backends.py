"""Finding a backend: the entry-point group `localllm.backends`, ours registered exactly as a third party's."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from localllm.errors import BackendMissingError, ModelFileError, ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from localllm_backends.contract import BackendType

GROUP = "localllm.backends"


def names() -> list[str]:
    """Registered backends, without importing any."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def named(name: str) -> BackendType:
    """The backend registered under `name`; UsageError naming the others if there is none."""
    for point in entry_points(group=GROUP):
        if point.name == name:
            found: BackendType = point.load()
            return found
    raise UsageError(f"there is no backend {name!r}", hint=f"installed backends: {', '.join(names()) or 'none'}")


def for_path(path: str, preferred: str = "auto") -> BackendType:
    """The backend that runs the files at `path`: `preferred`, or the first that accepts them and is available here."""
    from pathlib import Path

    if not Path(path).exists():
        raise ModelNotFoundError(f"there is no model at {path!r}", hint="check the path, or see `localllm models list`")
    if preferred != "auto":
        backend = named(preferred)
        _require(backend)
        if not backend.accepts(path):
            raise ModelFileError(
                f"{Path(path).name!r} is not a model that the {preferred} backend runs",
                hint="leave --backend at auto: the files decide (llamacpp runs GGUF files, mlx runs MLX folders)",
            )
        return backend
    accepting = [b for b in map(named, names()) if b.accepts(path)]
    if not accepting:
        raise ModelFileError(
            f"{Path(path).name!r} is neither a GGUF file nor an MLX folder",
            hint="give a .gguf file, an MLX folder, or a name from `localllm models list`",
        )
    for backend in accepting:
        if backend.available() is None:
            return backend
    _require(accepting[0])
    return accepting[0]


def _require(backend: BackendType) -> None:
    missing = backend.available()
    if missing is not None:
        raise BackendMissingError(missing)
