"""A pull that is interrupted, killed or refused is retried, and resumes where it stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from library.hub import Hub, Schedule, sha256
from library.test_pull import REPO, content, files
from localllm.errors import DownloadError, ModelNotFoundError
from localllm.library.hub import Patience
from localllm.library.pull import pull
from localllm.library.resolve import resolve
from localllm.library.transfer import DownloadProgress


def test_retry_after_is_honoured_and_a_long_one_ends_the_pull(
    hub: Hub, patience: Patience, waits: list[float]
) -> None:
    hub.add(REPO, files("Q4_K_M"))
    hub.retry_after = "17"
    hub.schedule = Schedule(seed=1, once=[("api", "429"), ("content", "429")] * 3)
    pull(REPO, patience=patience)
    assert waits.count(17.0) == len([f for f in hub.schedule.met if f[1] == "429"]) > 0
    hub.add("tiny-org/other", files("Q8_0"))
    hub.retry_after = "3600"
    hub.schedule = Schedule(always=("content", "429"))
    with pytest.raises(DownloadError, match="3600 s"):
        pull("tiny-org/other", patience=patience)


def test_retry_after_as_a_date_is_honoured(
    hub: Hub, patience: Patience, waits: list[float]
) -> None:
    hub.add(REPO, files("Q4_K_M"))
    hub.retry_after = format_datetime(datetime.now(UTC) + timedelta(seconds=50), usegmt=True)
    hub.schedule = Schedule(seed=1, once=[("api", "429"), ("content", "503")])
    pull(REPO, patience=patience)
    n_refused = len([fault for _, fault in hub.schedule.met if fault in ("429", "503")])
    assert len([wait for wait in waits if 30 < wait <= 50]) == n_refused > 0


@pytest.mark.parametrize("date", ["Sun, 06 Nov 1994 08:49:37 GMT", "soon", "Sun, 99 Nov 2094"])
def test_a_past_or_invalid_retry_after_date_is_replaced_by_our_own_wait(
    hub: Hub, patience: Patience, waits: list[float], date: str
) -> None:
    hub.add(REPO, files("Q4_K_M"))
    hub.retry_after = date
    hub.schedule = Schedule(seed=1, once=[("api", "429"), ("content", "429")])
    pull(REPO, patience=patience)
    assert waits
    assert all(0 < wait < 30 for wait in waits)


# --- interruptions --------------------------------------------------------------------------------


def test_kill_9_during_a_download_then_again_resumes(
    hub: Hub, cache: Path, home: Path, patience: Patience
) -> None:
    body = content(5, 4_000_000)
    hub.add(REPO, {"Tiny-1B-Q4_K_M.gguf": body})
    hub.pause_after = 2_500_000
    code = f"from localllm.library.pull import pull; pull({REPO!r})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        assert hub.paused.wait(60), "the download never began"
        partial = cache / "models--tiny-org--Tiny-1B-GGUF" / "blobs" / f"{sha256(body)}.incomplete"
        deadline = time.monotonic() + 30
        while not (partial.exists() and partial.stat().st_size >= 1_000_000):
            assert time.monotonic() < deadline, "nothing was written"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    hub.resume.set()
    kept = partial.stat().st_size
    with pytest.raises(ModelNotFoundError):
        resolve(REPO)
    hub.pause_after = 0
    hub.seen.clear()
    local = pull(REPO, patience=patience)
    assert local.path.read_bytes() == body
    assert [s.range for s in hub.contents()] == [f"bytes={kept}-"]
    assert hub.contents()[0].sent_bytes == len(body) - kept
    assert not partial.exists()


def test_an_interrupt_keeps_the_partial_file_and_the_next_pull_resumes(
    hub: Hub, cache: Path, patience: Patience
) -> None:
    body = content(6, 3_000_000)
    hub.add(REPO, {"Tiny-1B-Q4_K_M.gguf": body})

    def interrupt(progress: DownloadProgress) -> None:
        if progress.done_bytes > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(REPO, on_progress=interrupt, patience=patience)
    assert pull(REPO, patience=patience).path.read_bytes() == body
    assert hub.contents()[-1].range.startswith("bytes=1")


@pytest.mark.parametrize(
    "left", ["prefix", "garbage of the same length", "too long", "wrong prefix"]
)
def test_a_partial_file_of_any_content_ends_in_the_right_file(
    hub: Hub, cache: Path, patience: Patience, left: str
) -> None:
    body = content(5)
    hub.add(REPO, {"Tiny-1B-Q4_K_M.gguf": body})
    blobs = cache / "models--tiny-org--Tiny-1B-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(body)}.incomplete").write_bytes({
        "prefix": body[:100_000], "garbage of the same length": content(9), "too long": body + b"x",
        "wrong prefix": content(9)[:1000],
    }[left])  # fmt: skip
    assert pull(REPO, patience=patience).path.read_bytes() == body


@pytest.mark.parametrize("bad", [content(5)[:-1000], content(9), b""])
def test_a_blob_another_program_left_wrong_is_not_accepted(
    hub: Hub, cache: Path, patience: Patience, bad: bytes
) -> None:
    body = content(5)
    hub.add(REPO, {"Tiny-1B-Q4_K_M.gguf": body})
    blobs = cache / "models--tiny-org--Tiny-1B-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / sha256(body)).write_bytes(bad)
    assert pull(REPO, patience=patience).path.read_bytes() == body


def test_a_hub_that_always_sends_wrong_content_causes_an_error_and_leaves_no_file(
    hub: Hub, cache: Path, patience: Patience
) -> None:
    hub.add(REPO, files("Q4_K_M"))
    hub.schedule = Schedule(always=("content", "corrupt"))
    with pytest.raises(DownloadError, match="still differs"):
        pull(REPO, patience=patience)
    assert len(hub.contents()) == 2
    assert not list(cache.rglob("*.gguf"))
    assert not [b for b in cache.rglob("blobs/*") if b.stat().st_size]


def test_a_newer_commit_brings_only_what_changed(hub: Hub, patience: Patience) -> None:
    hub.add(REPO, {"Tiny-1B-Q4_K_M.gguf": content(1), "notes.json": b"{}"})
    first = pull(REPO, patience=patience)
    hub.add(REPO, {"Tiny-1B-Q4_K_M.gguf": content(1), "notes.json": b"[]"})
    hub.seen.clear()
    second = pull(REPO, patience=patience)
    assert not hub.contents()
    assert second.path != first.path
    assert second.path.resolve() == first.path.resolve()
    assert resolve(REPO).path == second.path
