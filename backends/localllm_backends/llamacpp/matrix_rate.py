"""How fast the installed llama.cpp multiplies matrices on the processor: its own kernels, timed
type by type.

What a core makes of them differs tenfold with its vector units, with what the build was compiled
for, and with the type of the weights; neither a name nor a clock tells it. A program of its own, as
a build for another processor ends with an illegal instruction:

    python -m localllm_backends.llamacpp.matrix_rate TYPE…        (such as Q4_K; prints one JSON
                                                                  object)

Weights are multiplied as they are stored and as llama.cpp lays them out when it loads a model (the
first buffer type of the CPU backend that takes the product: ggml-backend.h,
`ggml_backend_dev_get_extra_bufts`): which is quicker is not the same for a prompt and for a token,
nor on every processor.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from localllm_backends.llamacpp.native import GgmlInitParams, ggml_function, start_native
from localllm_backends.llamacpp.threads import usable_cores
from localllm_backends.program import print_answers

# ggml.h: enum ggml_type; ggml-backend.h: enum ggml_backend_dev_type
_F32 = 0
_I32 = 26
_CPU = 0
_N_TYPES = 40
# The best of so many seconds' products, and of so many at least, is what the kernels give.
_SECONDS = 0.1
_FEWEST = 3
_CONTEXT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Size:
    """A product: `tokens` by a matrix of so many rows and columns, or by `n_chosen` each of
    `n_experts` such matrices (0: one)."""

    rows: int
    columns: int
    tokens: int
    n_experts: int = 0
    n_chosen: int = 1


# A prompt, whose matrices are computed; the same through experts, of which each token is sent to
# two: other kernels, and 64 rows each; and a token, whose 66 MB (of Q4_K) no cache holds.
_PROMPT = _Size(2048, 2048, 512)
_EXPERTS = _Size(768, 2048, 512, 16, 2)
_TOKEN = _Size(28672, 4096, 1)


# FLOP/s (two per weight and token) by kind of product.
Rates = dict[str, float]


def rates(n_threads: int, types: Sequence[str]) -> dict[str, dict[str, Rates]]:
    """What the CPU backend makes of matrices of each of `types` with `n_threads` threads: "stored"
    as they lie in a file, and "laid_out" anew where this build has a layout for them on this
    processor. A type that this build does not know is left out.

    Raises RuntimeError where its kernels fail, AttributeError where it lacks a function. What has
    no CPU backend, or no room for a matrix, ends the process.
    """
    start_native()
    processor = _Processor(n_threads)
    known = {}
    for number in range(_N_TYPES):
        name = ggml_function("ggml_type_name")(number) or b""
        known[name.decode(errors="replace").upper()] = number
    return {name: processor.rates(known[name]) for name in types if name in known}


class _Processor:
    """ggml's CPU backend with so many threads."""

    def __init__(self, n_threads: int) -> None:
        self.device = ggml_function("ggml_backend_dev_by_type")(_CPU)
        self._backend = ggml_function("ggml_backend_dev_init")(self.device, None)
        self.stored = ggml_function("ggml_backend_dev_buffer_type")(self.device)
        set_threads = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
        set_threads(self._address(b"ggml_backend_set_n_threads"))(self._backend, n_threads)

    def _address(self, name: bytes) -> Any:
        registry = ggml_function("ggml_backend_dev_backend_reg")(self.device)
        return ggml_function("ggml_backend_reg_get_proc_address")(registry, name)

    def rates(self, weights: int) -> dict[str, Rates]:
        """Of weights of that type, by how they lie in memory."""
        found: dict[str, Rates] = {}
        stored_experts = None
        stored = self._rates_in(self.stored, weights)
        if stored is not None:
            found["stored"] = stored
            # Experts that a layout does not take are multiplied as they are stored.
            stored_experts = stored["experts_flops_s"]
        for memory in self._laid_out():
            laid_out = self._rates_in(memory, weights, stored_experts)
            if laid_out is not None:
                found["laid_out"] = laid_out
                break
        return found

    def _rates_in(
        self, memory: int, weights: int, usual_experts: float | None = None
    ) -> Rates | None:
        """Of weights of that type in that kind of memory; None where they can't lie there."""
        prompt = self._flops_s(memory, weights, _PROMPT)
        experts = self._flops_s(memory, weights, _EXPERTS)
        token = self._flops_s(memory, weights, _TOKEN)
        if prompt is None or token is None:
            return None
        return {
            "prompt_flops_s": prompt,
            "experts_flops_s": experts or usual_experts or prompt,
            "token_flops_s": token,
        }

    def _laid_out(self) -> list[int]:
        """The buffer types that lay weights out anew, in the order in which llama.cpp tries
        them."""
        address = self._address(b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        prototype = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
        listed = prototype(address)(self.device)
        found: list[int] = []
        # NULL ends the list.
        while listed[len(found)]:
            found.append(int(listed[len(found)]))
        return found

    def _flops_s(self, memory: int, weights_type: int, size: _Size) -> float | None:
        """Of products of matrices in that kind of memory and tokens in plain memory; None where the
        processor does not support them."""
        with ExitStack() as freed:
            weights_in = _context(freed)
            rest_in = _context(freed)
            depth = max(1, size.n_experts)
            weights = _tensor(weights_in, weights_type, size.columns, size.rows, depth)
            chosen = None
            if size.n_experts:
                # Experts take their tokens one beside the other.
                prompt = _tensor(rest_in, _F32, size.columns, 1, size.tokens)
                chosen = _tensor(rest_in, _I32, size.n_chosen, size.tokens, 1)
                product = ggml_function("ggml_mul_mat_id")(rest_in, weights, prompt, chosen)
            else:
                prompt = _tensor(rest_in, _F32, size.columns, size.tokens, 1)
                product = ggml_function("ggml_mul_mat")(rest_in, weights, prompt)
            graph = ggml_function("ggml_new_graph")(rest_in)
            ggml_function("ggml_build_forward_expand")(graph, product)
            for context, kind in ((weights_in, memory), (rest_in, self.stored)):
                buffer = ggml_function("ggml_backend_alloc_ctx_tensors_from_buft")(context, kind)
                freed.callback(ggml_function("ggml_backend_buffer_free"), buffer)
            if not ggml_function("ggml_backend_dev_supports_op")(self.device, product):
                return None  # and nothing can be written to that memory
            # Zeros are multiplied as fast as anything; fresh memory may hold NaNs, which some
            # processors are slow at.
            for tensor in (weights, prompt):
                _fill(tensor, bytes(ggml_function("ggml_nbytes")(tensor)))
            if chosen is not None:
                # In turn, so that every expert has as many.
                numbers = [i % size.n_experts for i in range(size.n_chosen * size.tokens)]
                _fill(chosen, struct.pack(f"{len(numbers)}i", *numbers))
            compute = partial(ggml_function("ggml_backend_graph_compute"), self._backend, graph)
            # The first product is not counted: it wakes the threads.
            if compute():
                raise RuntimeError("llama.cpp could not multiply two matrices")
            flops = 2 * size.rows * size.columns * size.tokens * size.n_chosen
            return flops / _best_s(compute)


def _best_s(work: Callable[[], object]) -> float:
    best_s = float("inf")
    n = 0
    deadline = time.perf_counter() + _SECONDS
    while n < _FEWEST or time.perf_counter() < deadline:
        started = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - started)
        n += 1
    return best_s


def _context(freed: ExitStack) -> int:
    made = ggml_function("ggml_init")(GgmlInitParams(_CONTEXT_BYTES, None, True))
    freed.callback(ggml_function("ggml_free"), made)
    return int(made)


def _tensor(context: int, kind: int, *shape: int) -> int:
    return int(ggml_function("ggml_new_tensor_3d")(context, kind, *shape))


def _fill(tensor: int, data: bytes) -> None:
    ggml_function("ggml_backend_tensor_set")(tensor, data, 0, len(data))


def _answers() -> Iterator[dict[str, Any]]:
    threads = usable_cores()
    found = rates(threads, sys.argv[1:])
    yield {"rates": found, "threads": threads, "cpu_s": time.process_time()}


if __name__ == "__main__":
    sys.exit(print_answers(_answers))
