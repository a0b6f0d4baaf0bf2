"""How fast the installed llama.cpp multiplies quantised matrices on the processor: its own kernels, timed.

What a core makes of them differs tenfold with its vector units and with what the build was compiled for, and neither a
name nor a clock tells it. A program of its own, as a build for another processor ends with an illegal instruction:

    python -m localllm_backends.llamacpp.matrix_rate        (prints one JSON object)

The weights are Q4_K, as they are stored and as llama.cpp lays them out when it loads a model (the first buffer type of the CPU
backend that takes the product: ggml-backend.h, `ggml_backend_dev_get_extra_bufts`): which is quicker is not the same for a
prompt and for a token, nor on every processor.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from localllm_backends.llamacpp.cores import usable_cores
from localllm_backends.llamacpp.native import ggml_function, start_native

# ggml.h: enum ggml_type; ggml-backend.h: enum ggml_backend_dev_type
_F32, _Q4_K, _CPU = 0, 12, 0
# (weights' rows and columns, tokens): a prompt, whose matrices are computed; and a token, whose 66 MB no cache holds.
_PROMPT, _TOKEN = ((2048, 2048), 512), ((28672, 4096), 1)
# The best of so many seconds' products, and of so many at least, is what the kernels give.
_SECONDS = 0.2
_FEWEST = 3
_CONTEXT_BYTES = 1 << 20

_Pointer, _Size = ctypes.c_void_p, ctypes.c_size_t


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", _Size), ("mem_buffer", _Pointer), ("no_alloc", ctypes.c_bool)]


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOP/s (two per weight and token) at a prompt's product, and at one token's."""

    prompt_flops_s: float
    token_flops_s: float


def rates(n_threads: int) -> dict[str, Rates]:
    """What the CPU backend makes of Q4_K matrices with `n_threads` threads: "stored" as they lie in a file, and "laid_out" anew
    where this build has a layout for them on this processor.

    Raises RuntimeError where this build has no CPU backend or its kernels fail, AttributeError where it lacks a function.
    """
    start_native()
    device = ggml_function("ggml_backend_dev_by_type", _Pointer, ctypes.c_int)(_CPU)
    if not device:
        raise RuntimeError("this llama.cpp has no CPU backend")
    backend = ggml_function("ggml_backend_dev_init", _Pointer, _Pointer, ctypes.c_char_p)(device, None)
    registry = ggml_function("ggml_backend_dev_backend_reg", _Pointer, _Pointer)(device)
    ask = ggml_function("ggml_backend_reg_get_proc_address", _Pointer, _Pointer, ctypes.c_char_p)
    ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_int)(ask(registry, b"ggml_backend_set_n_threads"))(backend, n_threads)
    stored = ggml_function("ggml_backend_dev_buffer_type", _Pointer, _Pointer)(device)
    supported = ggml_function("ggml_backend_dev_supports_op", ctypes.c_bool, _Pointer, _Pointer)
    compute = ggml_function("ggml_backend_graph_compute", ctypes.c_int, _Pointer, _Pointer)

    def timed(kind: int, size: tuple[tuple[int, int], int]) -> float | None:
        (rows, width), tokens = size
        graph, product = _product(kind, stored, rows, width, tokens)
        if not supported(device, product):
            return None
        # The first product is not counted: it wakes the threads.
        if compute(backend, graph):
            raise RuntimeError("llama.cpp could not multiply two matrices")
        return 2 * rows * width * tokens / _best_s(partial(compute, backend, graph))

    found: dict[str, Rates] = {}
    layouts = _laid_out(ask(registry, b"ggml_backend_dev_get_extra_bufts"), device)
    for name, kind in (("stored", stored), *(("laid_out", kind) for kind in layouts)):
        prompt, token = timed(kind, _PROMPT), timed(kind, _TOKEN)
        if prompt is not None and token is not None:
            found.setdefault(name, Rates(prompt, token))
    return found


def _product(weights_kind: int, plain: int, rows: int, width: int, tokens: int) -> tuple[int, int]:
    """(graph, its one product) of a matrix of Q4_K in that kind of memory and tokens in plain memory. The process that
    measures ends soon: nothing is freed."""
    weights_in, rest_in = _context(), _context()
    weights, prompt = _matrix(weights_in, _Q4_K, width, rows), _matrix(rest_in, _F32, width, tokens)
    product = ggml_function("ggml_mul_mat", _Pointer, _Pointer, _Pointer, _Pointer)(rest_in, weights, prompt)
    graph = ggml_function("ggml_new_graph", _Pointer, _Pointer)(rest_in)
    ggml_function("ggml_build_forward_expand", None, _Pointer, _Pointer)(graph, product)
    allocate = ggml_function("ggml_backend_alloc_ctx_tensors_from_buft", _Pointer, _Pointer, _Pointer)
    if not (allocate(weights_in, weights_kind) and allocate(rest_in, plain)):
        raise RuntimeError("llama.cpp could not hold a matrix")
    # Zeros are multiplied as fast as anything; fresh memory may hold NaNs, which some processors are slow at.
    fill = ggml_function("ggml_backend_tensor_set", None, _Pointer, ctypes.c_char_p, _Size, _Size)
    for tensor in (weights, prompt):
        size = ggml_function("ggml_nbytes", _Size, _Pointer)(tensor)
        fill(tensor, bytes(size), 0, size)
    return graph, product


def _best_s(work: Callable[[], object]) -> float:
    best_s, n, deadline = float("inf"), 0, time.perf_counter() + _SECONDS
    while n < _FEWEST or time.perf_counter() < deadline:
        started = time.perf_counter()
        work()
        best_s, n = min(best_s, time.perf_counter() - started), n + 1
    return best_s


def _context() -> int:
    made = ggml_function("ggml_init", _Pointer, _InitParams)(_InitParams(_CONTEXT_BYTES, None, True))
    if not made:
        raise RuntimeError("llama.cpp made no context for a graph")
    return int(made)


def _matrix(context: int, kind: int, width: int, rows: int) -> int:
    new = ggml_function("ggml_new_tensor_2d", _Pointer, _Pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return int(new(context, kind, width, rows))


def _laid_out(address: int | None, device: int) -> list[int]:
    """The CPU backend's buffer types that lay weights out anew, in the order in which llama.cpp tries them."""
    if not address:
        return []
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(_Pointer), _Pointer)(address)(device)
    found: list[int] = []
    while listed and listed[len(found)]:
        found.append(int(listed[len(found)]))
    return found


def _main() -> int:
    try:
        threads = usable_cores()
        found = {name: asdict(rate) for name, rate in rates(threads).items()}
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    print(json.dumps({"rates": found, "threads": threads, "cpu_s": time.process_time()}))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
