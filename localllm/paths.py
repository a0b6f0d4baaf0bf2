"""Locations of files on this disk. Only this module uses platformdirs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localllm.errors import UsageError

APP = "localllm"
# Largest text file that is read unless a caller sets another limit.
MAX_FILE_BYTES = 32 << 20
# Opening a pipe waits for its writer without this flag. Windows has no such files.
_READ_ONLY = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def _dir(env: str, default: str) -> Path:
    override = os.environ.get(env)
    if override:
        return Path(override).expanduser()
    import platformdirs

    check_home()
    return Path(getattr(platformdirs.PlatformDirs(APP), default))


def check_home() -> None:
    """Raise UsageError if HOME is a relative path.

    Files would be in another place for each working directory. platformdirs then takes the home of
    the account, which is not the one that was named.
    """
    home = os.environ.get("HOME", "")
    if home and not Path(home).is_absolute() and os.name != "nt":
        raise UsageError(
            f"HOME is {home!r}, which is not an absolute path",
            hint="set HOME to a folder's full path, for example /home/me",
        )


def config_dir() -> Path:
    """Folder of config.toml and the user's own catalog files. LOCALLLM_CONFIG_DIR overrides it."""
    return _dir("LOCALLLM_CONFIG_DIR", "user_config_dir")


def data_dir() -> Path:
    """Folder of data that a user would miss: conversations, measurements of this machine.

    LOCALLLM_DATA_DIR overrides it.
    """
    return _dir("LOCALLLM_DATA_DIR", "user_data_dir")


def cache_dir() -> Path:
    """Folder of data that can be rebuilt: the prefix cache's disk tier, probes.

    LOCALLLM_CACHE_DIR overrides it.
    """
    return _dir("LOCALLLM_CACHE_DIR", "user_cache_dir")


def prefixes_dir() -> Path:
    """KV of earlier prompts, one folder per model (engine/cache/folder.py)."""
    return cache_dir() / "prefixes"


def kv_evidence_dir() -> Path:
    """Measured loss of precision by KV type, one file per model."""
    return data_dir() / "kv-evidence"


def decisions_dir() -> Path:
    """Fitted temperatures for decisions, one file per model
    (server/dialects/systemone/questions.py)."""
    return data_dir() / "decisions"


def shared_rows_file() -> Path:
    """Return the file of speeds that others measured."""
    return data_dir() / "measured-by-others.json"


def quants_dir() -> Path:
    """Quants that `localllm quantize` made, one folder per model."""
    return data_dir() / "quants"


def builds_dir() -> Path:
    """Builds of the engine made by `localllm setup`, one folder each (setup/builds.py)."""
    return data_dir() / "builds"


def log_dir() -> Path:
    """Folder of the logs of servers and workers. LOCALLLM_LOG_DIR overrides it."""
    return _dir("LOCALLLM_LOG_DIR", "user_log_dir")


def worker_log() -> Path | None:
    """The log file of workers, or None if the disk is full or read-only. Workers then run without
    one."""
    try:
        log = private_dir(log_dir()) / "worker.log"
        log.touch()
    except OSError:
        return None
    return log


def private_dir(path: Path) -> Path:
    """Create the folder `path` so that only its owner can read it, and return it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


_PRIVATE_MODE = 0o600
# The process's umask removes permissions from it, as for every new file.
_SHARED_MODE = 0o666


def write_private(path: Path, text: str) -> None:
    """Atomically replace the file `path` with `text`. Others can't read the file at any time.

    If `path` is a link, its target is replaced. Raises OSError, always with the file's name.
    """
    _replace_file(path.resolve(), text, _PRIVATE_MODE)


def write_text(path: Path, text: str) -> None:
    """Atomically replace a text file that others may read. A device or a pipe is written to.

    If `path` is a link, its target is replaced. Raises OSError, always with the file's name.
    """
    path = path.resolve()
    if not path.exists() or path.is_file():
        _replace_file(path, text, _SHARED_MODE)
        return
    with _named_errors(path):
        path.write_text(text, encoding="utf-8")


def _replace_file(path: Path, text: str, mode: int) -> None:
    """Write `text` to a new file with these permissions, then move it to `path`."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.new")
    partial.unlink(missing_ok=True)
    try:
        with _named_errors(path):
            descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Add the name of `path` to an OSError without one. On a full disk, writing raises such an
    error."""
    try:
        yield
    except OSError as e:
        if e.filename is None:
            e.filename = str(path)
        raise


def file_bytes(path: Path, most_bytes: int = MAX_FILE_BYTES, begin: int = 0) -> bytes:
    """Read a regular file of at most `most_bytes`, from the byte `begin` on.

    Raises OSError, also for pipes, devices and larger files: a pipe may wait forever, and a device
    may have no end.
    """
    with open(path, "rb", opener=_opened) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        if about.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
        file.seek(begin)
        return file.read(most_bytes)


def _opened(path: str, _flags: int) -> int:
    return os.open(path, _READ_ONLY)


def file_text(path: Path, most_bytes: int = MAX_FILE_BYTES, encoding: str = "utf-8") -> str:
    """Read a regular text file, with any newline as "\\n".

    Raises OSError as `file_bytes` does, and UnicodeDecodeError.
    """
    text = file_bytes(path, most_bytes).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def regular_files(folder: Path, pattern: str) -> Iterator[Path]:
    """The files in `folder` that match `pattern`, without folders, pipes and devices: to open a pipe
    would wait for its writer."""
    for path in folder.glob(pattern):
        if path.is_file():
            yield path
