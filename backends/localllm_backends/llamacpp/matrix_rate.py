"""Measure the speed of matrix products of the installed llama.cpp on the processor, for each type
of weights.

A core's speed differs tenfold with its vector units, the build's compile options and the type of
weights. Name and clock rate do not predict it. This is a program of its own, because a build for
another processor ends with an illegal instruction:

    python -m localllm_backends.llamacpp.matrix_rate TYPE…        (such as Q4_K; prints one JSON
                                                                  object)

Weights are multiplied in their stored layout, and in the layout into which llama.cpp repacks them
at load. The latter is the first buffer type of the CPU backend that supports the product
(ggml-backend.h, `ggml_backend_dev_get_extra_bufts`). Which one is faster depends on the processor,
and differs between prefill and decode.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from localllm_backends.llamacpp.native import bindings, start_native
from localllm_backends.llamacpp.threads import usable_cores
from localllm_backends.probe_process import print_answers

# Repeat products for this many seconds, and at least this often. The best time counts.
_SECONDS = 0.1
_MIN_REPEATS = 3
_CONTEXT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Size:
    """Size of a product: `tokens` by a matrix of `rows` × `columns`.

    With `n_experts` (0: one matrix) there are that many matrices, and each token is multiplied by
    `n_chosen` of them.
    """

    rows: int
    columns: int
    tokens: int
    n_experts: int = 0
    n_chosen: int = 1


# A prompt, which is limited by compute. The same with experts, two per token: other kernels, and 64
# rows per expert. And a single token, whose 66 MB (Q4_K) exceed any cache.
_PROMPT = _Size(2048, 2048, 512)
_EXPERTS = _Size(768, 2048, 512, 16, 2)
_TOKEN = _Size(28672, 4096, 1)


# FLOP/s (two per weight and token) by kind of product.
Rates = dict[str, float]


def rates(n_threads: int, types: Sequence[str]) -> dict[str, dict[str, Rates]]:
    """Measure the CPU backend's speed for each of `types` with `n_threads` threads.

    "stored" is the layout of the file. "laid_out" is the repacked layout, if this build has one for
    this processor. Types that this build does not know are left out.

    Raises RuntimeError if the kernels fail, AttributeError if the build lacks a function. The
    process ends if there is no CPU backend or no memory for a matrix.
    """
    llama = start_native()
    processor = _Processor(n_threads)
    known = {}
    for number in range(llama.GGML_TYPE_COUNT):
        name = llama.ggml_type_name(number) or b""
        known[name.decode(errors="replace").upper()] = number
    return {name: processor.rates(known[name]) for name in types if name in known}


class _Processor:
    """ggml's CPU backend with `n_threads` threads."""

    def __init__(self, n_threads: int) -> None:
        llama = bindings()
        self.device = llama.ggml_backend_dev_by_type(llama.GGML_BACKEND_DEVICE_TYPE_CPU)
        self._backend = llama.ggml_backend_dev_init(self.device, None)
        self.stored = llama.ggml_backend_dev_buffer_type(self.device)
        address = self._address(b"ggml_backend_set_n_threads")
        llama.ggml_backend_set_n_threads_t(address)(self._backend, n_threads)

    def _address(self, name: bytes) -> Any:
        registry = bindings().ggml_backend_dev_backend_reg(self.device)
        return bindings().ggml_backend_reg_get_proc_address(registry, name)

    def rates(self, weights: int) -> dict[str, Rates]:
        """Measure weights of that type, by their layout in memory."""
        rates_by_type: dict[str, Rates] = {}
        stored_experts = None
        stored = self._rates_in(self.stored, weights)
        if stored is not None:
            rates_by_type["stored"] = stored
            # If a layout does not support experts, they are multiplied in the stored layout.
            stored_experts = stored["experts_flops_s"]
        for memory in self._repacking_types():
            laid_out = self._rates_in(memory, weights, stored_experts)
            if laid_out is not None:
                rates_by_type["laid_out"] = laid_out
                break
        return rates_by_type

    def _rates_in(
        self, memory: int, weights: int, usual_experts: float | None = None
    ) -> Rates | None:
        """Measure weights of that type in that kind of memory; None if it does not support them."""
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

    def _repacking_types(self) -> list[int]:
        """Return the buffer types that repack weights, in the order in which llama.cpp tries
        them."""
        address = self._address(b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        listed = bindings().ggml_backend_dev_get_extra_bufts_t(address)(self.device)
        found: list[int] = []
        # NULL ends the list.
        while listed[len(found)]:
            found.append(int(listed[len(found)]))
        return found

    def _flops_s(self, memory: int, weights_type: int, size: _Size) -> float | None:
        """Measure products of weights in that kind of memory and tokens in normal memory.

        Returns None if the processor does not support the product.
        """
        with ExitStack() as freed:
            weights_in = _context(freed)
            rest_in = _context(freed)
            depth = max(1, size.n_experts)
            weights = _tensor(weights_in, weights_type, size.columns, size.rows, depth)
            chosen = None
            if size.n_experts:
                # Expert products take each token as a separate column.
                prompt = _tensor(rest_in, bindings().GGML_TYPE_F32, size.columns, 1, size.tokens)
                chosen = _tensor(rest_in, bindings().GGML_TYPE_I32, size.n_chosen, size.tokens, 1)
                product = bindings().ggml_mul_mat_id(rest_in, weights, prompt, chosen)
            else:
                prompt = _tensor(rest_in, bindings().GGML_TYPE_F32, size.columns, size.tokens, 1)
                product = bindings().ggml_mul_mat(rest_in, weights, prompt)
            graph = bindings().ggml_new_graph(rest_in)
            bindings().ggml_build_forward_expand(graph, product)
            for context, kind in ((weights_in, memory), (rest_in, self.stored)):
                buffer = bindings().ggml_backend_alloc_ctx_tensors_from_buft(context, kind)
                freed.callback(bindings().ggml_backend_buffer_free, buffer)
            if not bindings().ggml_backend_dev_supports_op(self.device, product):
                return None  # writing to that memory is not possible either
            # The values do not affect the speed, except NaNs, which are slow on some processors.
            # New memory may hold NaNs, so write zeros.
            for tensor in (weights, prompt):
                _fill(tensor, bytes(bindings().ggml_nbytes(tensor)))
            if chosen is not None:
                # Round robin, so that every expert gets the same number of tokens.
                numbers = [i % size.n_experts for i in range(size.n_chosen * size.tokens)]
                _fill(chosen, struct.pack(f"{len(numbers)}i", *numbers))
            compute = partial(bindings().ggml_backend_graph_compute, self._backend, graph)
            # The first product is not timed: it wakes the threads.
            if compute():
                raise RuntimeError("llama.cpp could not multiply two matrices")
            flops = 2 * size.rows * size.columns * size.tokens * size.n_chosen
            return flops / _best_s(compute)


def _best_s(work: Callable[[], object]) -> float:
    best_s = float("inf")
    n = 0
    deadline = time.perf_counter() + _SECONDS
    while n < _MIN_REPEATS or time.perf_counter() < deadline:
        started = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - started)
        n += 1
    return best_s


def _context(freed: ExitStack) -> int:
    context = bindings().ggml_init(bindings().ggml_init_params(_CONTEXT_BYTES, None, True))
    freed.callback(bindings().ggml_free, context)
    return int(context)


def _tensor(context: int, kind: int, *shape: int) -> int:
    return int(bindings().ggml_new_tensor_3d(context, kind, *shape))


def _fill(tensor: int, data: bytes) -> None:
    bindings().ggml_backend_tensor_set(tensor, data, 0, len(data))


def _answers() -> Iterator[dict[str, Any]]:
    threads = usable_cores()
    found = rates(threads, sys.argv[1:])
    yield {"rates": found, "threads": threads, "cpu_s": time.process_time()}


if __name__ == "__main__":
    sys.exit(print_answers(_answers))
