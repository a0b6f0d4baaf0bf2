"""The installed llama.cpp's matrix kernels, timed by the program that is run for it."""

from __future__ import annotations

import json
import subprocess
import sys

from localllm_backends.llamacpp.cores import usable_cores


def test_the_program_tells_what_this_processors_cores_multiply() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localllm_backends.llamacpp.matrix_rate"], capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    assert "stored" in answer["rates"]
    assert set(answer["rates"]) <= {"stored", "laid_out"}
    for rates in answer["rates"].values():
        # The slowest core that runs llama.cpp at all multiplies faster, the fastest thousand slower.
        assert 1e7 < rates["token_flops_s"] < 1e15
        assert 1e8 < rates["prompt_flops_s"] < 1e15
    assert answer["threads"] == usable_cores()
    assert answer["cpu_s"] > 0
