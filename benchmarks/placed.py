"""Layers and experts on other devices, without a GPU: same tokens, and the planned bytes?

python -m benchmarks.placed LIBRARY [MODEL.gguf] [--devices 2] [--tokens 16] [--context 2048]
[--batch 128]

llama.cpp's RPC device offers another process's processor as an accelerator, with separate buffers,
splits and copies. LIBRARY is that device as a plug-in for the installed llama-cpp-python, built
from the sources of its release, in ggml/:

    g++ -O2 -std=c++17 -fPIC -shared -DGGML_BACKEND_DL -DGGML_BACKEND_BUILD -DGGML_BACKEND_SHARED
    -DGGML_SHARED \\
        -Iinclude -Isrc -o libggml-rpc.so src/ggml-rpc/ggml-rpc.cpp src/ggml-rpc/transport.cpp -L
        WHEEL/lib -lggml-base

Every placement is loaded. Its greedy tokens are compared with the processor's, and the bytes of
each device with the plan. The scratch buffers are an upper bound from a formula. They are visible
with the toy model (the default), but not with a large one.

"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

_MIB = 2**20
_PROMPT = [5 + (7 * i) % 400 for i in range(70)]


def _ggml() -> Any:
    """Return the library in which llama.cpp registers devices."""
    import llama_cpp

    return llama_cpp.llama_cpp._lib


def serve(library: str, endpoint: str) -> None:
    """Serve a device at `endpoint` until killed."""
    lib, rpc = _ggml(), ctypes.CDLL(library)
    lib.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(lib.ggml_backend_dev_by_type(0))
    start = rpc.ggml_backend_rpc_start_server
    start.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    start(endpoint.encode(), None, 1, 1, devices)


def register(library: str, endpoints: list[str]) -> None:
    """Register the devices at `endpoints` with llama.cpp."""
    lib, rpc = _ggml(), ctypes.CDLL(library)
    add = rpc.ggml_backend_rpc_add_server
    add.restype, add.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    lib.ggml_backend_register.argtypes = [ctypes.c_void_p]
    for endpoint in endpoints:
        lib.ggml_backend_register(add(endpoint.encode()))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(
        f"nothing listens on port {port}: does the library belong to the installed "
        "llama-cpp-python?"
    )


def placements(n_layers: int, *, experts: bool, n_devices: int) -> list[dict[str, Any]]:
    """Return the placements to try: everything, half of the layers, KV on the host, experts on the
    host, uneven devices."""
    found: list[dict[str, Any]] = [{}, {"gpu_layers": max(1, n_layers // 2)}, {"kv_on_host": True}]
    if experts:
        found += [
            {"experts_on_host": 1},
            {"experts_on_host": -1},
            {"gpu_layers": 2, "experts_on_host": -1},
        ]
    if n_devices > 1:
        found.append({"tensor_split": (3.0, *(1.0,) * (n_devices - 1))})
    return found


def run(
    path: Path, placed: dict[str, Any], options: argparse.Namespace
) -> tuple[list[int], dict[str, int]]:
    """Return the greedy tokens, and the bytes by place, of `path` with this placement."""
    from localllm_backends.contract import Chunk, LoadSpec, Placement
    from localllm_backends.llamacpp import backend_type

    backend = backend_type.load(
        LoadSpec(
            str(path), n_ctx=options.context, n_seq_max=2, n_batch=options.batch, n_outputs=4,
            placement=Placement(**placed),
        )
    )  # fmt: skip
    try:
        sequence, tokens = backend.new_sequence(), []
        backend.step([Chunk(sequence, _PROMPT[:64], outputs=0)])
        result = backend.step([Chunk(sequence, _PROMPT[64:], outputs=1)])
        for _ in range(options.tokens):
            tokens += result.argmax(0)
            result = backend.step([Chunk(sequence, tokens[-1:], outputs=1)])
        return tokens, backend.memory().places
    finally:
        backend.close()


def planned(path: Path, placed: dict[str, Any], options: argparse.Namespace) -> list[int]:
    """Return the bytes of each device as the planner counts them, without the reserve for
    schedulers of other engines."""
    from localllm.planner import layer_bytes, memory
    from localllm.planner.types import RunSettings
    from localllm_backends.placement import Placement
    from localllm_catalog import from_gguf, gguf

    model = from_gguf.model_from_gguf(gguf.read(path))
    variant = model.variants[0]
    spare = memory.spare_sequences(model, variant, heads=False)
    ran = RunSettings(
        options.context,
        slots=2,
        spare=spare,
        n_batch=options.batch,
        n_outputs=4,
        placement=Placement(**placed),
    )
    rows = memory.layer_ledger(model, variant, ran).device_layers(ran.placement)
    split = ran.placement.tensor_split or (1.0,) * options.devices
    scratch = memory.compute_bytes(model, ran) + memory.pipeline_bytes(model, ran, options.devices)
    return [held + scratch for held in layer_bytes.as_split(rows, split, options.devices)]


def compare(path: Path, options: argparse.Namespace, endpoints: list[str]) -> None:
    """Load every placement, and print the comparison."""
    from localllm_catalog import from_gguf, gguf

    model = from_gguf.model_from_gguf(gguf.read(path))
    expected, _ = run(path, {"gpu_layers": 0}, options)
    tried = placements(
        len(model.layers), experts=model.experts is not None, n_devices=len(endpoints)
    )
    for placed in tried:
        tokens, held = run(path, placed, options)
        print(
            f"{placed or 'everything'}: "
            f"{'the same tokens' if tokens == expected else 'OTHER TOKENS'}",
            flush=True,
        )
        for endpoint, said in zip(endpoints, planned(path, placed, options), strict=True):
            real = sum(n for name, n in held.items() if endpoint in name)
            off = f"{100 * (said / real - 1):+.2f} %" if real else "nothing there"
            print(
                f"    {endpoint}: planned {said / _MIB:.2f} MiB, holds {real / _MIB:.2f} ({off})",
                flush=True,
            )


def main() -> None:
    """Start the devices, compare, and end them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("model", nargs="?", type=Path)
    for name, value in (("devices", 1), ("tokens", 16), ("context", 2048), ("batch", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.library, options.serve)
        return
    ports = [_free_port() for _ in range(options.devices)]
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "benchmarks.placed", options.library]
    servers = [
        subprocess.Popen(
            [*command, f"--serve={e}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ,
        )
        for e in endpoints
    ]
    try:
        for port in ports:
            _wait_for(port)
        register(options.library, endpoints)
        with tempfile.TemporaryDirectory() as folder:
            from models import tiny_gguf

            compare(
                options.model or tiny_gguf.write_moe(Path(folder) / "moe.gguf"), options, endpoints
            )
    finally:
        for server in servers:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
