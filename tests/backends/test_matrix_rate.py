"""Speed of the installed llama.cpp's matrix kernels, measured by a separate program."""

from __future__ import annotations

import json
import subprocess
import sys

from localllm_backends.llamacpp.threads import usable_cores


def test_the_program_measures_the_matrix_rate_of_this_processor() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localllm_backends.llamacpp.matrix_rate", "Q4_K", "F16", "NEW_TYPE"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    # A type that this build does not know is not an error: files of that type can't be run either.
    assert set(answer["rates"]) == {"Q4_K", "F16"}
    for layouts in answer["rates"].values():
        assert "stored" in layouts
        assert set(layouts) <= {"stored", "laid_out"}
        for rates in layouts.values():
            # The slowest core that runs llama.cpp is faster than the lower bound, and a thousand of
            # the fastest cores are slower than the upper bound.
            assert 1e7 < rates["token_flops_s"] < 1e15
            assert 1e8 < rates["prompt_flops_s"] < 1e15
            assert 1e8 < rates["experts_flops_s"] < 1e15
    # A token with 16-bit weights is memory-bound; with 4-bit weights it is bound by memory or
    # arithmetic.
    by_type = {
        name: layouts["stored"]["token_flops_s"] for name, layouts in answer["rates"].items()
    }
    assert by_type["F16"] < 1.5 * by_type["Q4_K"]
    assert answer["threads"] == usable_cores()
    assert answer["cpu_s"] > 0
