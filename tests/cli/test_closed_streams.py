"""Commands without standard streams, as pythonw, cron and Windows services start programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
for number in {closed}:
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "localllm", *{words}])
"""


@pytest.mark.skipif(os.name == "nt", reason="execv returns at once there")
@pytest.mark.parametrize("words", [["--version"], ["models", "list"], ["catalog", "--help"]])
@pytest.mark.parametrize("closed", [[1], [0, 1], [0, 1, 2]])
def test_a_command_ends_without_an_error(words: list[str], closed: list[int]) -> None:
    code = CODE.format(closed=closed, words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
