"""`localllm pull REF`: download and verify a model. Progress goes to stderr, the path to stdout."""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from localllm.cli.commands.shared import Json
from localllm.cli.setting_options import with_setting_options
from localllm.formatting import span
from localllm.plain_output import TerminalLine, plain
from localllm.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from localllm.library.transfer import DownloadProgress
    from localllm.library.types import LocalModel
    from localllm_catalog.types import Companion

# Interval of progress lines if the output is no terminal (a log, a pipe).
_LOG_EVERY_S = 10.0
# A file below this size is downloaded before a line about it would be read.
_MIN_LOGGED_BYTES = 1_000_000
_REDRAW_EVERY_S = 0.1
# A download of this size takes longer than measuring the CPU, which takes a few seconds.
_MIN_MEASURING_BYTES = 10**9


@with_setting_options("offline")
def pull(
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="Catalog id, org/name[:QUANT], or an hf.co URL.")
    ],
    mmproj: Annotated[
        bool, typer.Option(help="Also download the image projector, if there is one.")
    ] = True,
    drafter: Annotated[
        bool, typer.Option("--drafter", help="Also download the drafter published for it.")
    ] = False,
    *,
    settings: Settings,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: Json = False,
) -> None:
    """Download a model. Chooses the variant, checks the disk, resumes downloads, verifies
    hashes."""

    from localllm.cli.commands.models_view import as_row
    from localllm.cli.commands.shared import print_json
    from localllm.library.pull import pull as fetch
    from localllm.load.candidates import variant_choice

    no_network = bool(settings.value("offline"))
    if not quiet:
        _print_needed_engine(ref)
    meter = ProgressLine(io.StringIO() if quiet else sys.stderr)
    try:
        on_progress = measuring_meter(meter)
        local: LocalModel = fetch(
            ref,
            on_progress=on_progress,
            choose=variant_choice(ref),
            mmproj=mmproj,
            offline=no_network,
        )
        drafter_files = {}
        if drafter and not no_network:
            drafter_files = _fetch_drafter(ref, local, meter)
    except KeyboardInterrupt:
        meter.close()
        if not quiet:
            print("stopped; the same command continues from here", file=sys.stderr)
        raise
    finally:
        meter.close()
    if as_json:
        drafters = [str(file) for file in drafter_files.values()]
        print_json({**as_row(local), "drafter": next(iter(drafters), None)})
        return
    if not quiet:
        _print_next_steps(ref, local, drafter_files)
    if drafter and not drafter_files and not quiet:
        print(
            "no drafter was downloaded: no published drafter is known for this model and format",
            file=sys.stderr,
        )
    print(local.path)


_TRAINED_KINDS = ("eagle3", "dflash")


def _fetch_drafter(ref: str, local: LocalModel, meter: ProgressLine) -> dict[Companion, Path]:
    """Download the first published trained drafter for these files. Returns an empty dict without
    one."""
    from localllm.library.pull import pull_drafter

    for companion in companions_of(ref, of_folder=local.is_folder):
        if companion.kind in _TRAINED_KINDS:
            return {companion: pull_drafter(companion, on_progress=meter)}
    return {}


def _print_next_steps(ref: str, local: LocalModel, drafter_files: dict[Companion, Path]) -> None:
    """Print how to chat with the model, and its drafters."""
    from localllm.formatting import byte_size
    from localllm.library.file_kinds import of_header

    name = f"{local.name} {local.quant}".strip()
    model_argument = local.ref if "://" in ref else ref
    size_text = byte_size(local.size_bytes)
    command = f"localllm chat -m {model_argument}"
    if not local.is_folder and of_header(local.path) in ("embedding", "reranker"):
        command = f"localllm serve {model_argument}"
    print(f"{name}, {size_text}: `{command}`", file=sys.stderr)
    for companion in companions_of(ref, of_folder=local.is_folder):
        print(drafter_text(ref, companion, drafter_files.get(companion)), file=sys.stderr)


def _print_needed_engine(ref: str) -> None:
    """Print which llama.cpp a catalog model needs, if the installed one can't read it."""
    from localllm.library.catalog import load_catalog
    from localllm.library.installed_names import catalog_model
    from localllm.load import readable_models

    model, _ = catalog_model(ref, load_catalog())
    if model is None:
        return
    for _, reason in readable_models.too_new([model]):
        print(f"note: {ref} {reason}", file=sys.stderr)


def companions_of(ref: str, *, of_folder: bool = False) -> tuple[Companion, ...]:
    """Return the published drafters of a catalog model for its GGUF files or its MLX folder; empty
    for other models."""
    from localllm.library.catalog import load_catalog
    from localllm.library.installed_names import catalog_model

    model, _ = catalog_model(ref, load_catalog())
    if model is None:
        return ()
    return tuple(companion for companion in model.companions if companion.folder == of_folder)


def drafter_text(ref: str, companion: Companion, path: Path | None) -> str:
    """Describe a drafter of a model and how to get it, or its path if it was downloaded."""
    place = companion.repo
    if companion.file:
        place += f", {companion.file}"
    subject = f"a drafter for it ({companion.kind}, {place})"
    if path is not None:
        return f"{subject} is installed: `--draft auto` uses it if it pays, `--draft {path}` always"
    if companion.kind in _TRAINED_KINDS:
        return f"{subject}: `localllm pull {ref} --drafter` downloads it"
    if companion.kind == "mtp" and companion.file:
        return (
            f"{subject}: its MTP heads in a separate file, which is not loaded; model files "
            "that contain the heads are"
        )
    if companion.kind == "mtp":
        return f"{subject}: this model with MTP heads, `localllm pull {companion.repo}`"
    return f"{subject}: `--draft {companion.repo}` once it is pulled"


def measuring_meter(
    meter: Callable[[DownloadProgress], None],
) -> Callable[[DownloadProgress], None]:
    """Return `meter`, extended to measure this CPU and its memory during a long download.

    The measurement runs only if no result is stored. It saves time for later answers that need it.
    """
    has_started = False

    def on_progress(progress: DownloadProgress) -> None:
        nonlocal has_started
        remaining_bytes = progress.total_bytes - progress.done_bytes
        if (
            not has_started
            and progress.state == "downloading"
            and remaining_bytes >= _MIN_MEASURING_BYTES
        ):
            import threading

            has_started = True
            threading.Thread(target=_measure_machine, name="timing", daemon=True).start()
        meter(progress)

    return on_progress


def _measure_machine() -> None:
    import contextlib

    from localllm.device import detect
    from localllm.errors import LocalLLMError

    with contextlib.suppress(LocalLLMError, OSError):
        detect.detect(measure=True)


class ProgressLine:
    """On a terminal, one line that is rewritten. Otherwise, a new line every ten seconds, and no
    line for a small file."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._line = TerminalLine(stream)
        self._clock = clock
        self._next_s = 0.0
        self._shown_step: tuple[str, str] = ("", "")

    def __call__(self, progress: DownloadProgress) -> None:
        now_s = self._clock()
        is_terminal = self._stream.isatty()
        if progress.state == "done":
            self.close()
            return
        # Without a terminal, a new file gets a line, but a change of state does not.
        step = (progress.state if is_terminal else "", progress.file)
        if step == self._shown_step and now_s < self._next_s:
            return
        if is_terminal:
            self._line.show(text(progress, shutil.get_terminal_size().columns - 1))
        elif progress.state != "listing" and not 0 < progress.total_bytes < _MIN_LOGGED_BYTES:
            print(plain(text(progress, 200)), file=self._stream, flush=True)
        self._shown_step = step
        self._next_s = now_s + (_REDRAW_EVERY_S if is_terminal else _LOG_EVERY_S)

    def close(self) -> None:
        """Clear the line on the terminal."""
        self._line.show("")


_VERBS = {
    "checking": "checking the downloaded part of", "downloading": "downloading",
    "waiting": "waiting for the hub:",
    "quantising": "writing", "verifying": "verifying", "listing": "reading the hub's listing of", "done": "done:",
}  # fmt: skip


def text(progress: DownloadProgress, columns: int) -> str:
    """Format `downloading NAME   2.1 of 4.7 GB   45 %   85 MB/s   31 s left`.

    The name is shortened on narrow terminals.
    """
    name = progress.file
    if progress.state != "listing":
        name = name.rpartition("/")[2]
    figures = ""
    if progress.total_bytes:
        share = min(1.0, progress.done_bytes / progress.total_bytes)
        figures = f"  {_amount_text(progress.done_bytes, progress.total_bytes)}  {share:4.0%}"
    if progress.speed_bytes_s and progress.state in ("downloading", "quantising"):
        figures += f"  {_rate_text(progress.speed_bytes_s)}"
        if progress.eta_s is not None:
            figures += f"  {span(progress.eta_s)} left"
    verb = _VERBS[progress.state]
    name_width = max(8, columns - len(verb) - len(figures) - 1)
    if len(name) > name_width:
        name = name[: name_width - 1] + "…"
    return f"{verb} {name}{figures}"[:columns]


def _amount_text(done_bytes: int, total_bytes: int) -> str:
    if total_bytes >= 1e9:
        return f"{done_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB"
    return f"{done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB"


def _rate_text(bytes_s: float) -> str:
    if bytes_s >= 1e5:
        return f"{bytes_s / 1e6:.1f} MB/s"
    return f"{bytes_s / 1e3:.1f} kB/s"
