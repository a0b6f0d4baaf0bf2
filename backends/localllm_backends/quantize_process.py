"""Write a quant in a process of its own: a damaged file may make native code abort.

    python -m localllm_backends.quantize_process

The order has the fields of QuantizeOrder, and the `engine`. The program prints {"planned_bytes": N}
before it writes. If it is ended, it removes what it has written (order_process.py).
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from localllm_backends.contract import QuantizeOrder
from localllm_backends.order_process import Order, Send, backend_named, run_order


def write(order: Order, send: Send) -> None:
    """Write the quant and wait until it is on the disk. Raises LoadError."""

    def send_planned(n_bytes: int) -> None:
        send({"planned_bytes": n_bytes})

    wanted = dict(order)
    backend = backend_named(wanted.pop("engine"))
    backend.quantize(QuantizeOrder(**wanted), send_planned)
    _flush(Path(order["target"]))


def _flush(target: Path) -> None:
    """Wait until the result is on the disk, so that it is whole even if the power fails."""
    files = [target]
    if target.is_dir():
        files = [path for path in target.iterdir() if path.is_file()]
    for path in files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def remove(order: Order) -> None:
    """Remove the file or folder that the order writes, if it exists."""
    target = Path(order["target"])
    if target.is_dir():
        shutil.rmtree(target, ignore_errors=True)
    with suppress(OSError):
        target.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(run_order(write, remove))
