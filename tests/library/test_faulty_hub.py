"""Randomised runs against a faulty hub end in a file with the right hash, or in a clear error.

24 seeds run in the suite, 200 with `-m long` (LOCALLLM_TEST_SEEDS changes the number). Each run
publishes random files, and may find remains of an earlier run or of another program. It meets
one to six temporary faults, and in one run of four a permanent one. It is then repeated against
a healthy hub, and must succeed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from library.hub import Hub, Repo, Schedule
from localllm.errors import DownloadError
from localllm.library import hf_cache, store
from localllm.library.hub import Patience
from localllm.library.pull import pull
from localllm.library.types import LocalModel
from support.until import until

_DISK_BYTES = 6 << 20
_RUNS = int(os.environ.get("LOCALLLM_TEST_SEEDS", "200"))


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """Yield a real tmpfs of 6 MiB, or None if this machine does not allow the mount."""
    folder = tmp_path_factory.mktemp("small-disk")
    mounted = False
    if sys.platform == "linux" and shutil.which("mount") is not None and os.geteuid() == 0:
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


class Ballast:
    """Another program that fills a disk.

    After `remove` it takes no more space, because a late answer of the hub may still call
    `fill`.
    """

    def __init__(self, disk: Path) -> None:
        self._file, self._lock, self._removed = disk / "ballast", threading.Lock(), False

    def fill(self) -> None:
        """Take all free space."""
        with self._lock:
            if self._removed:
                return
            with contextlib.suppress(OSError), self._file.open("ab", buffering=0) as f:
                while f.write(b"\0" * 4096):
                    pass

    def remove(self) -> None:
        """Release the space."""
        with self._lock:
            self._removed = True
            self._file.unlink(missing_ok=True)


def publish(hub: Hub, rng: random.Random) -> Repo:
    """Publish a repository of one of the three shapes, with random content."""

    def weights() -> bytes:
        return rng.randbytes(rng.randint(20_000, 700_000))

    shape = rng.choice(["whole", "split", "mlx"])
    if shape == "whole":
        return hub.add("org/Model-GGUF", {"Model-Q4_K_M.gguf": weights(), "README.md": b"x"})
    if shape == "split":
        count = rng.randint(2, 3)
        parts = [f"Model-Q4_K_M-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
        return hub.add("org/Model-GGUF", {part: weights() for part in parts})
    return hub.add(
        "org/Model-4bit",
        {"config.json": b'{"quantization": {"bits": 4}}', "model.safetensors": weights()},
    )


def leave_something(cache: Path, repo: Repo, rng: random.Random) -> str:
    """Write a possible remainder of one file, from an earlier run or another program."""
    name, content = rng.choice(
        [(n, c) for n, c in sorted(repo.files.items()) if not n.endswith(".md")]
    )
    digest = repo.digest(name)
    blobs = hf_cache.repo_folder(cache, repo.name) / "blobs"
    cut = rng.randrange(len(content))
    kinds = {
        "": None,
        "partial": (f"{digest}.incomplete", content[:cut]),
        "wrong partial": (f"{digest}.incomplete", rng.randbytes(cut)),
        "long partial": (f"{digest}.incomplete", content + b"more"),
        "short blob": (digest, content[:cut]),
        "wrong blob": (digest, rng.randbytes(len(content))),
    }
    left = rng.choice(["", "", *kinds])
    found = kinds[left]
    if found is not None:
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs / found[0]).write_bytes(found[1])
    return left


def assert_files_are_right(local: LocalModel, repo: Repo, cache: Path) -> None:
    """Check that every file has the published content, also as huggingface-hub finds it offline."""
    from huggingface_hub import hf_hub_download, scan_cache_dir

    snapshot = local.path if local.format == "mlx" else local.path.parent
    for name in [n for n in repo.files if n.endswith((".gguf", ".safetensors", ".json"))]:
        assert (snapshot / name).read_bytes() == repo.files[name], name
        theirs = hf_hub_download(repo.name, name, cache_dir=cache, local_files_only=True)
        assert Path(theirs).read_bytes() == repo.files[name], name
    assert not scan_cache_dir(cache).warnings


def assert_nothing_wrong_is_offered(cache: Path, repo: Repo) -> None:
    """Check that no name in a snapshot leads to wrong content, after any failed run.

    This holds for us and for huggingface-hub.
    """
    from huggingface_hub import try_to_load_from_cache

    for name, content in repo.files.items():
        theirs = try_to_load_from_cache(repo.name, name, cache_dir=cache, revision=repo.commit)
        assert theirs is None or Path(str(theirs)).read_bytes() == content, name
    for snapshot in hf_cache.snapshots(hf_cache.repo_folder(cache, repo.name)):
        for pointer in snapshot.rglob("*"):
            assert pointer.is_dir() or pointer.read_bytes() == repo.files[pointer.name], (
                pointer.name
            )


def run_one(seed: int, hub: Hub, cache: Path, disk: Path | None) -> tuple[str, Schedule]:
    """Do one randomised run. Return its end ("whole" or "error") and the faults it met."""
    rng = random.Random(seed)
    hub.repos.clear()
    hub.schedule = Schedule.random(seed)
    repo = publish(hub, rng)
    ballast = Ballast(disk) if disk is not None else None
    hub.fill_disk = ballast.fill if ballast is not None else None
    left = leave_something(cache, repo, rng)
    hurried = Patience(
        failures=5,
        read_s=0.15,
        connect_s=0.2,
        slow_window_s=0.03,
        least_bytes_s=100_000,
        sleep=lambda _: None,
    )
    local, error = None, None
    try:
        local = pull(repo.name, patience=hurried, reserve_bytes=0)
    except DownloadError as e:
        error = e
    if local is not None:
        assert_files_are_right(local, repo, cache)
    else:
        assert error is not None
        assert error.message
        assert error.hint, f"seed {seed}: no hint for {error.message}"
        assert not hf_cache.scan(cache), f"seed {seed}: what did not arrive whole is offered"
    assert_nothing_wrong_is_offered(cache, repo)
    met = hub.schedule
    if ballast is not None:
        ballast.remove()
    hub.schedule = Schedule()
    # The second run uses the remains of the first, with normal timeouts.
    calm = Patience(sleep=lambda _: None)
    assert_files_are_right(pull(repo.name, patience=calm, reserve_bytes=0), repo, cache)
    assert not hf_cache.partials(cache), f"seed {seed}: {left}"
    return "error" if local is None else "whole", met


def run_all(
    seeds: range, hub: Hub, cache: Path, disk: Path | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter[str], Counter[str]]:
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in seeds:
        tight = disk if seed % 2 == 0 else None
        where = tight / "hub" if tight is not None else cache
        shutil.rmtree(where, ignore_errors=True)
        monkeypatch.setenv("HF_HUB_CACHE", str(where))
        ended, schedule = run_one(seed, hub, where, tight)
        ends[ended] += 1
        faults.update(f"{kind}: {fault}" for kind, fault in schedule.met)
    print(f"\n{len(seeds)} runs: {dict(ends)}; faults met: {dict(faults.most_common())}")
    return ends, faults


def met_and_survived(runs: tuple[Counter[str], Counter[str]]) -> bool:
    """Return whether enough faults occurred, and whether most runs survived them."""
    ends, faults = runs
    n_runs = sum(ends.values())
    return sum(faults.values()) > n_runs and ends["whole"] > n_runs / 2 and ends["error"] > 0


def test_24_downloads_from_a_faulty_hub_end_correctly(
    hub: Hub, cache: Path, small_disk: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert met_and_survived(run_all(range(24), hub, cache, small_disk, monkeypatch))


@pytest.mark.long
def test_200_downloads_from_a_faulty_hub_end_correctly(
    hub: Hub, cache: Path, small_disk: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert met_and_survived(run_all(range(1000, 1000 + _RUNS), hub, cache, small_disk, monkeypatch))


def test_a_download_resumes_after_a_full_disk(
    hub: Hub, small_disk: Path | None, monkeypatch: pytest.MonkeyPatch, patience: Patience
) -> None:
    if small_disk is None:
        pytest.skip("no tmpfs can be mounted here (needs root on Linux): a full disk is not tried")
    where = small_disk / "hub"
    shutil.rmtree(where, ignore_errors=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(where))
    repo = hub.add("org/Model-GGUF", {"Model-Q4_K_M.gguf": random.Random(1).randbytes(3_000_000)})
    ballast = Ballast(small_disk)

    def has_begun() -> bool:
        return any(part.stat().st_size for part in where.rglob("*.incomplete"))

    def fill() -> None:
        until(has_begun, "the download did not reach the disk")
        ballast.fill()

    hub.fill_disk = fill
    hub.schedule = Schedule(seed=1, always=("content", "disk full"))
    with pytest.raises(DownloadError, match="is full") as e:
        pull(repo.name, patience=patience, reserve_bytes=0)
    assert "free disk space" in e.value.hint
    assert_nothing_wrong_is_offered(where, repo)
    with pytest.raises(DownloadError, match="0 kB free"):
        pull(repo.name, patience=patience, reserve_bytes=0)
    ballast.remove()
    hub.schedule = Schedule()
    hub.seen.clear()
    local = pull(repo.name, patience=patience, reserve_bytes=0)
    assert_files_are_right(local, repo, where)
    assert hub.contents()[0].range, "it went on where the full disk stopped it"
    assert store.du()
    shutil.rmtree(where)
