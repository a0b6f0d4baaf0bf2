"""Commands without standard streams, as pythonw, cron and Windows services start programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_narrow_terminals import BENCH, SERVE, STOPS, WITH_A_MODEL

# A shell's background job inherits an ignored SIGINT.
CODE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
for number in {closed}:
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "localllm", *{words}])
"""


@pytest.mark.skipif(os.name == "nt", reason="execv returns at once there")
@pytest.mark.parametrize("words", [["--version"], ["models", "list"], ["catalog", "--help"]])
@pytest.mark.parametrize("closed", [[1], [0, 1], [0, 1, 2]])
def test_a_command_without_standard_streams_ends_without_an_error(
    words: list[str], closed: list[int]
) -> None:
    code = CODE.format(closed=closed, words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", [*WITH_A_MODEL, BENCH])
def test_a_command_that_loads_a_model_ends_on_a_full_disk_and_without_output(
    words: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = words.replace("MODEL", str(tiny_model)).split()
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "localllm", *given]
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "the output can't be used: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "q.gguf").unlink(missing_ok=True)
    code = CODE.format(closed=[1], words=given)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


# Writing more than a few bytes to any file fails, as on a full disk. Pipes have no such limit.
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))
from localllm.__main__ import run
run()
"""


@pytest.mark.skipif(os.name == "nt", reason="needs resource limits")
@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["models", "adopt", "FOLDER"], "folders.json"),
        (["config", "set", "context", "4096"], "config.toml"),
        (["recommend", "--device", "m4-max-64gb", "--plot", "chart"], "chart.svg"),
        (["doctor", "--report", "report.txt"], "report.txt"),
    ],
)
def test_a_file_on_a_full_disk_is_named(
    words: list[str], file: str, tiny_model: Path, tmp_path: Path
) -> None:
    given = [word.replace("FOLDER", str(tiny_model.parent)) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *given],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert file in done.stderr
    assert "File too large" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("closed", [[], [1], [0, 1]])
def test_a_server_runs_with_output_to_a_full_disk_or_without_output(
    closed: list[int], tiny_model: Path
) -> None:
    code = CODE.format(closed=closed, words=SERVE.replace("MODEL", str(tiny_model)).split())
    with open("/dev/full", "w") as full:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=full,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    assert child.stderr is not None
    written = b""
    with child.stderr:
        for line in child.stderr:
            written += line
            if STOPS in line:
                child.send_signal(signal.SIGINT)
    assert (child.wait(), b"Traceback" in written) == (130, False), written
