"""llama.cpp's RPC: use devices of other machines, and lend ours. Only in builds that include it.

As a program it is the server. It runs until it is stopped:

    python -m localllm_backends.llamacpp.rpc 127.0.0.1:PORT [THREADS]
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from localllm_backends.contract import OtherMachineError
from localllm_backends.llamacpp.binding.engine_files import library_path
from localllm_backends.llamacpp.devices import devices_of_type
from localllm_backends.llamacpp.native import start_native

_CONNECT_S = 5.0
_connected: set[str] = set()


def _library() -> Any:
    if library_path("ggml-rpc") is None:
        raise OtherMachineError(
            "this build of llama.cpp has no RPC: build one with `localllm setup --rpc`"
        )
    llama = start_native()
    missing = llama.missing("rpc")
    if missing:
        raise OtherMachineError(f"this build of llama.cpp can't use RPC: {missing}")
    return llama


def connect(workers: Sequence[str]) -> None:
    """Add the devices of the `workers` (host:port) to llama.cpp's, before its own.

    Raises OtherMachineError, with the worker's name, if a worker does not answer.
    """
    for worker in workers:
        if worker in _connected:
            continue
        host, _, port = worker.rpartition(":")
        if not host or not port.isdecimal():
            raise OtherMachineError(
                f"{worker} is no HOST:PORT of a `localllm worker`. Only MLX models use hosts that are "
                "reached by SSH, and hostfiles"
            )
        rpc = _library()
        try:
            # Connect here first, because the library only reports that it failed.
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
                pass
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or str(e)
            raise OtherMachineError(
                f"the worker at {worker} does not answer ({why}): "
                "is `localllm worker` running there?"
            ) from e
        found = rpc.ggml_backend_rpc_add_server(worker.encode())
        if not found:
            raise OtherMachineError(
                f"the program that answers at {worker} is not a worker with this version of "
                "llama.cpp: update localllm on both machines"
            )
        rpc.ggml_backend_register(found)
        _connected.add(worker)


def serve(endpoint: str, n_threads: int) -> None:
    """Lend this machine's accelerators, or else its processor, at `endpoint` until the process
    ends."""
    rpc = _library()
    lent = devices_of_type("GPU", "IGPU") or devices_of_type("CPU")
    devices = (ctypes.c_void_p * len(lent))(*lent)
    rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, n_threads, len(lent), devices)


def _main(endpoint: str, n_threads: str = "") -> None:
    try:
        serve(endpoint, int(n_threads or os.cpu_count() or 1))
    except OtherMachineError as e:
        print(e, file=sys.stderr)
        sys.exit(6)


if __name__ == "__main__":
    _main(*sys.argv[1:])
