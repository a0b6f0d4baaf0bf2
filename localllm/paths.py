"""Where things live on this disk: the only module that asks platformdirs."""

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
    """config.toml and the user's own catalog files (LOCALLLM_CONFIG_DIR overrides)."""
    return _dir("LOCALLLM_CONFIG_DIR", "user_config_dir")


def data_dir() -> Path:
    """Conversations and this machine's measurements: what a user would miss (LOCALLLM_DATA_DIR
    overrides)."""
    return _dir("LOCALLLM_DATA_DIR", "user_data_dir")


def cache_dir() -> Path:
    """What can be rebuilt: the prefix cache's disk tier, probes (LOCALLLM_CACHE_DIR overrides)."""
    return _dir("LOCALLLM_CACHE_DIR", "user_cache_dir")


def prefixes_dir() -> Path:
    """KV of earlier prompts, one folder per model (engine/cache/folder.py)."""
    return cache_dir() / "prefixes"


def kv_evidence_dir() -> Path:
    """What KV types were measured to cost in precision, a file a model."""
    return data_dir() / "kv-evidence"


def decisions_dir() -> Path:
    """Temperatures fitted for the decisions of a model, a file a model
    (server/dialects/systemone/questions.py)."""
    return data_dir() / "decisions"


def builds_dir() -> Path:
    """Builds of the engine that `localllm setup` made, one folder each (setup/builds.py)."""
    return data_dir() / "builds"


def log_dir() -> Path:
    """Logs of servers and workers (LOCALLLM_LOG_DIR overrides)."""
    return _dir("LOCALLLM_LOG_DIR", "user_log_dir")


def worker_log() -> Path | None:
    """Where workers write what goes wrong; None on a full or read-only disk, where they run
    without."""
    try:
        log = private_dir(log_dir()) / "worker.log"
        log.touch()
    except OSError:
        return None
    return log


def private_dir(path: Path) -> Path:
    """Create `path` readable by its owner only, and return it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def write_private(path: Path, text: str) -> None:
    """`text` as the whole of `path`, or nothing of it, never readable by others, not even for a
    moment; where `path` is a link, of what it leads to. Raises OSError."""
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
