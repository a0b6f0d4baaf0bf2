"""Several servers use one folder of cached prefixes. Each server finds the files of the others, one
size limit applies to all, and a killed server does not affect the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.drive import settle
from engine.folder_writer import cached_of, engine_of, prompt_of
from localllm.engine.cache import tunables
from localllm.engine.cache.kv_file import read_data, read_entry
from support.until import until

DISK_BYTES = 40_000
WRITER = Path(__file__).parent / "folder_writer.py"


def writer(folder: Path, first: int, n: int, *stops: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(folder), str(DISK_BYTES), str(first), str(n)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *stops], stdin=pipe, stdout=pipe, text=True, env=environment)


def printed(process: subprocess.Popen[str], last: str = "") -> list[str]:
    """Return the output lines of a process up to `last`, or all of them."""
    assert process.stdout is not None
    lines = []
    for line in iter(process.stdout.readline, ""):
        lines.append(line.strip())
        if lines[-1] == last:
            break
    return lines


def read_last(process: subprocess.Popen[str]) -> None:
    """Let the process read its last prompt."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def test_two_processes_share_one_folder_and_one_may_be_killed_during_a_write(
    tmp_path: Path,
) -> None:
    with writer(tmp_path, 0, 4, "stops") as killed, writer(tmp_path, 20, 2) as other:
        # There is room for one more prompt, so `killed` need not remove files that were just used.
        assert printed(killed, "2") == ["0", "1", "2"]
        assert printed(other, "20") == ["20"]
        read_last(killed)
        assert printed(killed, "writing") == ["writing"]
        (part,) = tmp_path.glob(f"*/*.{killed.pid}.part")
        read_last(other)
        killed.kill()
        killed.wait()
        assert printed(other) == ["21"]
        assert other.wait() == 0
    kept = files(tmp_path)
    assert kept
    (folder,) = {path.parent for path in kept}
    for path in kept:
        assert read_entry(path, folder.name) is not None
        opened = read_data(lambda path=path: path.open("rb"), folder.name, path.name, _ignore, 1)
        assert opened is not None
    largest = max(path.stat().st_size for path in kept)
    assert sum(path.stat().st_size for path in kept) <= DISK_BYTES + largest
    engine = engine_of(tmp_path, DISK_BYTES)
    assert not part.exists(), "the process that wrote it has ended"
    # The newest prompt of either process: it is undefined which one wrote last.
    assert any(cached_of(engine, number) > 500 for number in (21, 20, 2))
    engine.check_integrity()
    engine.close()


def _ignore(n_bytes: int, took_s: float) -> None:
    del n_bytes, took_s


def test_a_running_server_finds_files_written_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunables, "FOLDER_SCAN_S", 0.01)
    first = engine_of(tmp_path, 10**9)
    second = engine_of(tmp_path, 10**9)
    assert cached_of(first, 1) == 0

    def is_found() -> bool:
        settle(second)
        known = second.pool.kv.cache.peek(prompt_of(1)).length
        return known > 500

    until(is_found)
    assert cached_of(second, 1) > 500
    for engine in (first, second):
        engine.check_integrity()
        engine.close()


def test_a_file_that_another_server_removed_is_a_miss(tmp_path: Path) -> None:
    first = engine_of(tmp_path, 10**9)
    cached_of(first, 1)
    first.close()
    second = engine_of(tmp_path, 10**9)
    for path in files(tmp_path):
        path.unlink()
    assert cached_of(second, 1) == 0
    assert files(tmp_path)
    second.close()


def test_a_layout_in_use_stays_and_one_unused_for_a_day_is_deleted(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 10**9)
    cached_of(engine, 1)
    (own,) = {path.parent for path in files(tmp_path)}
    engine.close()
    kind = own.name.rsplit("-", 1)[0]
    used = tmp_path / f"{kind}-0123456789abcdef"
    unused = tmp_path / f"{kind}-fedcba9876543210"
    another = tmp_path / "another-model"
    for folder in (used, unused, another):
        folder.mkdir()
        (folder / "x.kv").write_bytes(b"x")
    old_s = own.stat().st_mtime - 1.1 * tunables.FOLDER_UNUSED_S
    for folder in (unused, another):
        os.utime(folder, (old_s, old_s))
    engine_of(tmp_path, 10**9).close()
    assert used.exists()
    assert another.exists()
    assert not unused.exists()


def test_an_incomplete_file_of_another_machine_stays_until_it_is_old(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 10**9)
    cached_of(engine, 1)
    engine.close()
    (own,) = {path.parent for path in files(tmp_path)}
    fresh, old = own / "a.elsewhere.77.part", own / "b.elsewhere.77.part"
    for part in (fresh, old):
        part.write_bytes(b"x")
    old_s = own.stat().st_mtime - 1.1 * tunables.PART_UNUSED_S
    os.utime(old, (old_s, old_s))
    engine_of(tmp_path, 10**9).close()
    assert fresh.exists()
    assert not old.exists()
