"""A separate home directory for every library test, and a loopback hub for tests that request
one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from library.hub import Hub, running
from localllm.library import app_folders, store
from localllm.library.hub import Patience

_ELSEWHERE = (
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OLLAMA_MODELS",
    "OLLAMA_HOME", "LLAMA_CACHE",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy",
    "HF_HUB_ETAG_TIMEOUT",
    "HF_HUB_DOWNLOAD_TIMEOUT", "LOCALAPPDATA",
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty home directory, so that tests see only the models that they create."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ".cache"))
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    for name in _ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def nothing_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate that the starter model's package is not installed."""
    monkeypatch.setattr("localllm.library.starter.path", lambda: None)
    assert store.packaged() == []


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the suite's offline rule for the loopback hub, also in huggingface-hub.

    huggingface-hub reads the variable on import.
    """
    import huggingface_hub.constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    # Only the loopback hub may answer, so no token stored on this machine is used.
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def hub(online: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a running hub without repositories. HF_ENDPOINT is its address."""
    with running(Hub()) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


@pytest.fixture
def cache(home: Path) -> Path:
    """Return the hub's cache of this test."""
    return app_folders.hub_cache()


@pytest.fixture
def waits() -> list[float]:
    """Collect the waits that `patience` requested, in seconds."""
    return []


@pytest.fixture
def patience(waits: list[float]) -> Patience:
    """Return short timeouts, and a sleep function that only records its waits."""
    return Patience(
        failures=6,
        connect_s=5.0,
        read_s=1.0,
        slow_window_s=0.2,
        least_bytes_s=5_000,
        sleep=waits.append,
    )
