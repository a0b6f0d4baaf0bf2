"""Locations of files on this disk. Only this module uses platformdirs."""

from __future__ import annotations

import os
from pathlib import Path

APP = "localllm"


def _dir(env: str, default: str) -> Path:
    override = os.environ.get(env)
    if override:
        return Path(override).expanduser()
    import platformdirs

    return Path(getattr(platformdirs.PlatformDirs(APP), default))


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


def write_private(path: Path, text: str) -> None:
    """Atomically replace the file `path` with `text`. Others can't read the file at any time.

    If `path` is a link, its target is replaced. Raises OSError.
    """
    path = path.resolve()
    partial = path.with_name(f"{path.name}.{os.getpid()}.new")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(
            os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8"
        ) as f:
            f.write(text)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
