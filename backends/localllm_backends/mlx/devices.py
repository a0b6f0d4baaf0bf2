"""Print MLX's device after a test computation.

This is a program of its own, since a driver may end its process.

python -m localllm_backends.mlx.devices        (prints one JSON object, exits with 1 if MLX can't
                                               compute)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from localllm_backends.probe_process import print_answers


def _answers() -> Iterator[dict[str, Any]]:
    import mlx.core as mx

    ones = mx.ones((64, 64))
    total = mx.sum(ones @ ones).item()
    if total != 64**3:
        sys.exit(f"the product of two 64 x 64 matrices of ones has the sum {total}, not {64**3}")
    yield {"device": str(mx.default_device()), "info": dict(mx.device_info())}


if __name__ == "__main__":
    sys.exit(print_answers(_answers))
