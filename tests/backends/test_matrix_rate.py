"""The installed llama.cpp's matrix kernels, timed by the program that is run for it."""

from __future__ import annotations

import json
import subprocess
import sys

from localllm_backends.llamacpp.threads import usable_cores


def test_the_program_tells_what_this_processors_cores_multiply() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localllm_backends.llamacpp.matrix_rate", "Q4_K", "F16", "NEW_TYPE"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    # A type that this build does not know is no error: files of it can't be run either.
    assert set(answer["rates"]) == {"Q4_K", "F16"}
    for layouts in answer["rates"].values():
        assert "stored" in layouts
        assert set(layouts) <= {"stored", "laid_out"}
        for rates in layouts.values():
            # The slowest core that runs llama.cpp at all multiplies faster, the fastest thousand
            # slower.
            assert 1e7 < rates["token_flops_s"] < 1e15
            assert 1e8 < rates["prompt_flops_s"] < 1e15
            assert 1e8 < rates["experts_flops_s"] < 1e15
    # A token of 16 bits a weight is bound by memory, of 4 bits by it or by arithmetic.
    by_type = {
        name: layouts["stored"]["token_flops_s"] for name, layouts in answer["rates"].items()
    }
    assert by_type["F16"] < 1.5 * by_type["Q4_K"]
    assert answer["threads"] == usable_cores()
    assert answer["cpu_s"] > 0
