"""Asks MLX for its device and has it compute something: a program of its own, since a driver may end its process.

python -m localllm_backends.mlx.devices        (prints one JSON object, exits with 1 where MLX does not compute)
"""

from __future__ import annotations

import json
import sys


def _main() -> int:
    try:
        import mlx.core as mx

        total = mx.sum(mx.ones((64, 64)) @ mx.ones((64, 64))).item()
        told = {str(name): value for name, value in mx.device_info().items()}
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    if total != 64**3:
        print(f"64 x 64 ones times as many gave a sum of {total}, not {64**3}", file=sys.stderr)
        return 1
    print(json.dumps({"device": str(mx.default_device()), "info": told}, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
