"""Make a quant: check memory and disk, run the engine in a process of its own, and put the result
in place.

The result is written under a temporary name and renamed when it is whole. The process removes the
temporary file if this process ends first.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from localllm import __version__, paths
from localllm.errors import BackendMissingError, DoesNotFitError, LocalLLMError
from localllm.formatting import byte_size
from localllm.library import folders
from localllm.library.transfer import DownloadMeter, DownloadProgress
from localllm.memory.guard import check_before_load
from localllm.quants.process import BackendProgram
from localllm.quants.source import QuantSource
from localllm_backends import registry
from localllm_backends.contract import QuantizeOrder

_PROGRESS_S = 0.25
# Share of the result's size that must stay free on the disk in addition.
_FREE_DISK_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class QuantRequest:
    """A quant that a user asks for.

    `quant`: its name ("Q4_K_M"). `target`: path of the result. `imatrix`: its importance matrix.
    """

    source: QuantSource
    quant: str
    target: Path
    imatrix: Path | None = None


def make_quant(request: QuantRequest, on_progress: Callable[[DownloadProgress], None]) -> float:
    """Write the quant to `request.target`, whole or not at all. Returns the seconds that it took.

    Raises DoesNotFitError, BackendMissingError, or BackendError with the engine's reason.
    """
    local = request.source.local
    engine = registry.running(local.format)
    why_unavailable = registry.backends()[engine.name].available()
    if why_unavailable is not None:
        raise BackendMissingError(why_unavailable)
    check_before_load(f"quantising {local.name}", request.source.working_bytes)
    started_s = time.monotonic()
    partial = request.target.with_name(f".{request.target.name}.{os.getpid()}.partial")
    try:
        request.target.parent.mkdir(parents=True, exist_ok=True)
        _write(engine.name, request, partial, on_progress)
        os.replace(partial, request.target)
    except OSError as e:
        raise LocalLLMError(
            f"{request.target} can't be written: {e.strerror or e}",
            hint="check the permissions of its folder, or give another path with --output",
        ) from e
    finally:
        _remove_partial(partial)
        # Leave no empty folder if there is no result.
        if request.target.parent.parent == paths.quants_dir():
            with suppress(OSError):
                request.target.parent.rmdir()
    _link_projector(request)
    return time.monotonic() - started_s


def _write(
    engine: str,
    request: QuantRequest,
    partial: Path,
    on_progress: Callable[[DownloadProgress], None],
) -> None:
    order = {"engine": engine, **asdict(_quantize_order(request, partial))}
    meter = DownloadMeter(0, on_progress)
    with closing(BackendProgram("quantize_process", order)) as program:
        for message in program.messages(_PROGRESS_S):
            if "planned_bytes" in message:
                meter.total_bytes = message["planned_bytes"] + request.source.header_bytes
                _check_disk(request.target.parent, meter.total_bytes)
            meter.report("quantising", request.target.name, _written_bytes(partial))


def _quantize_order(request: QuantRequest, partial: Path) -> QuantizeOrder:
    local = request.source.local
    provenance = {
        "quantize.source.file": local.path.name,
        "quantize.source.type": request.source.type_name,
        "quantize.source.bytes": str(local.size_bytes),
        "quantize.program": f"localllm {__version__}",
    }
    if local.repo:
        provenance["quantize.source.repo"] = local.repo
    imatrix = "" if request.imatrix is None else str(request.imatrix)
    return QuantizeOrder(str(local.path), str(partial), request.quant, imatrix, provenance)


def _check_disk(folder: Path, needs_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needs_bytes * (1 + _FREE_DISK_SHARE) > free_bytes:
        raise DoesNotFitError(
            f"the quant needs {byte_size(needs_bytes)}, and the disk of {folder} has "
            f"{byte_size(free_bytes)} free",
            hint="free disk space (`localllm models du`), choose a smaller quant, or give a folder "
            "on another disk with --output",
        )


def _written_bytes(path: Path) -> int:
    files = [path]
    if path.is_dir():
        files = folders.files_below(path)
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _remove_partial(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    with suppress(OSError):
        partial.unlink(missing_ok=True)


def _link_projector(request: QuantRequest) -> None:
    """Link the model's image projector into the folder of the result, so that it still reads
    images."""
    projector = request.source.local.mmproj
    if projector is None:
        return
    link = request.target.with_name(projector.name)
    # A link may exist, and some file systems have no links.
    with suppress(OSError):
        link.symlink_to(projector.resolve())
