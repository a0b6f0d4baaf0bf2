"""How fast the installed llama.cpp multiplies matrices on the processor: its own kernels, timed type by type.

What a core makes of them differs tenfold with its vector units, with what the build was compiled for, and with the type of the
weights; neither a name nor a clock tells it. A program of its own, as a build for another processor ends with an illegal
instruction:

    python -m localllm_backends.llamacpp.matrix_rate TYPE…        (such as Q4_K; prints one JSON object)

Weights are multiplied as they are stored and as llama.cpp lays them out when it loads a model (the first buffer type of the CPU
backend that takes the product: ggml-backend.h, `ggml_backend_dev_get_extra_bufts`): which is quicker is not the same for a
prompt and for a token, nor on every processor.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial

from localllm_backends.llamacpp.native import GgmlInitParams, ggml_function, start_native
from localllm_backends.llamacpp.threads import usable_cores

# ggml.h: enum ggml_type; ggml-backend.h: enum ggml_backend_dev_type
_F32, _I32, _CPU = 0, 26, 0
_TYPES = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ4_NL": 20, "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39,
}  # fmt: skip
# The best of so many seconds' products, and of so many at least, is what the kernels give.
_SECONDS = 0.1
_FEWEST = 3
_CONTEXT_BYTES = 1 << 20

_Pointer, _Bytes = ctypes.c_void_p, ctypes.c_size_t


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOP/s (two per weight and token) at a prompt's product, at a prompt's with experts, and at one token's."""

    prompt_flops_s: float
    experts_flops_s: float
    token_flops_s: float


@dataclass(frozen=True, slots=True)
class _Size:
    """A product: `tokens` by a matrix of so many rows and columns, or by `n_chosen` each of `n_experts` such matrices (0: one)."""

    rows: int
    columns: int
    tokens: int
    n_experts: int = 0
    n_chosen: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.tokens * self.n_chosen


# A prompt, whose matrices are computed; the same through experts, of which each token is sent to two: other kernels, and 64 rows
# each; and a token, whose 66 MB (of Q4_K) no cache holds.
_PROMPT, _EXPERTS, _TOKEN = _Size(2048, 2048, 512), _Size(768, 2048, 512, 16, 2), _Size(28672, 4096, 1)


def rates(n_threads: int, types: Sequence[str]) -> dict[str, dict[str, Rates]]:
    """What the CPU backend makes of matrices of each of `types` with `n_threads` threads: "stored" as they lie in a file, and
    "laid_out" anew where this build has a layout for them on this processor. A type that this build does not know is left out.

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

    def timed(kind: int, weights: int, size: _Size) -> float | None:
        with _product(kind, stored, weights, size, partial(supported, device)) as graph:
            if graph is None:
                return None
            # The first product is not counted: it wakes the threads.
            if compute(backend, graph):
                raise RuntimeError("llama.cpp could not multiply two matrices")
            return size.flops / _best_s(partial(compute, backend, graph))

    type_name = ggml_function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    kinds = [("laid_out", kind) for kind in _laid_out(ask(registry, b"ggml_backend_dev_get_extra_bufts"), device)]
    found: dict[str, dict[str, Rates]] = {}
    for name in types:
        number = _TYPES.get(name, _F32)
        if (type_name(number) or b"").decode(errors="replace").upper() != name:
            continue
        of_type: dict[str, Rates] = {}
        for layout, kind in (("stored", stored), *kinds):
            if layout in of_type:
                continue
            prompt, experts, token = (timed(kind, number, size) for size in (_PROMPT, _EXPERTS, _TOKEN))
            if prompt is not None and token is not None:
                # Experts that this layout does not take are multiplied as they are stored.
                experts = of_type["stored"].experts_flops_s if experts is None and of_type else experts
                of_type[layout] = Rates(prompt, experts or prompt, token)
        found[name] = of_type
    return found


@contextmanager
def _product(
    weights_kind: int, plain: int, weights_type: int, size: _Size, supported: Callable[[int], bool]
) -> Iterator[int | None]:
    """The graph of one product of matrices in that kind of memory and tokens in plain memory; None where it is not `supported`."""
    with ExitStack() as freed:
        weights_in, rest_in = _context(freed), _context(freed)
        weights = _tensor(weights_in, weights_type, size.columns, size.rows, max(1, size.n_experts))
        prompt = _tensor(
            rest_in, _F32, size.columns, 1 if size.n_experts else size.tokens, size.tokens if size.n_experts else 1
        )
        filled = [(weights, b""), (prompt, b"")]
        if size.n_experts:
            chosen = _tensor(rest_in, _I32, size.n_chosen, size.tokens, 1)
            # In turn, so that every expert has as many.
            numbers = [i % size.n_experts for i in range(size.n_chosen * size.tokens)]
            filled.append((chosen, struct.pack(f"{len(numbers)}i", *numbers)))
            by_number = ggml_function("ggml_mul_mat_id", _Pointer, _Pointer, _Pointer, _Pointer, _Pointer)
            product = by_number(rest_in, weights, prompt, chosen)
        else:
            product = ggml_function("ggml_mul_mat", _Pointer, _Pointer, _Pointer, _Pointer)(rest_in, weights, prompt)
        graph = ggml_function("ggml_new_graph", _Pointer, _Pointer)(rest_in)
        ggml_function("ggml_build_forward_expand", None, _Pointer, _Pointer)(graph, product)
        allocate = ggml_function("ggml_backend_alloc_ctx_tensors_from_buft", _Pointer, _Pointer, _Pointer)
        for context, kind in ((weights_in, weights_kind), (rest_in, plain)):
            buffer = allocate(context, kind)
            if not buffer:
                raise RuntimeError("llama.cpp could not hold a matrix")
            freed.callback(ggml_function("ggml_backend_buffer_free", None, _Pointer), buffer)
        if not supported(product):
            yield None  # and nothing can be written to that memory
            return
        # Zeros are multiplied as fast as anything; fresh memory may hold NaNs, which some processors are slow at.
        fill = ggml_function("ggml_backend_tensor_set", None, _Pointer, ctypes.c_char_p, _Bytes, _Bytes)
        for tensor, data in filled:
            n_bytes = ggml_function("ggml_nbytes", _Bytes, _Pointer)(tensor)
            fill(tensor, data or bytes(n_bytes), 0, n_bytes)
        yield int(graph)


def _best_s(work: Callable[[], object]) -> float:
    best_s, n, deadline = float("inf"), 0, time.perf_counter() + _SECONDS
    while n < _FEWEST or time.perf_counter() < deadline:
        started = time.perf_counter()
        work()
        best_s, n = min(best_s, time.perf_counter() - started), n + 1
    return best_s


def _context(freed: ExitStack) -> int:
    made = ggml_function("ggml_init", _Pointer, GgmlInitParams)(GgmlInitParams(_CONTEXT_BYTES, None, True))
    if not made:
        raise RuntimeError("llama.cpp made no context for a graph")
    freed.callback(ggml_function("ggml_free", None, _Pointer), made)
    return int(made)


def _tensor(context: int, kind: int, *shape: int) -> int:
    sizes = [ctypes.c_int64] * len(shape)
    return int(
        ggml_function(f"ggml_new_tensor_{len(shape)}d", _Pointer, _Pointer, ctypes.c_int, *sizes)(context, kind, *shape)
    )


def _laid_out(address: int | None, device: int) -> list[int]:
    """The CPU backend's buffer types that lay weights out anew, in the order in which llama.cpp tries them."""
    if not address:
        return []
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(_Pointer), _Pointer)(address)(device)
    found: list[int] = []
    while listed and listed[len(found)]:
        found.append(int(listed[len(found)]))
    return found


def _main(types: Sequence[str]) -> int:
    try:
        threads = usable_cores()
        found = {
            name: {layout: asdict(rate) for layout, rate in layouts.items()}
            for name, layouts in rates(threads, types).items()
        }
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    print(json.dumps({"rates": found, "threads": threads, "cpu_s": time.process_time()}))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
