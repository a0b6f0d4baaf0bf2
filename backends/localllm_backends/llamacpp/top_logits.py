"""Select the top-k logits of each row on the device, so that full rows need not be copied with
several streams.

llama.cpp's samplers on devices (llama.h: "backend sampling", experimental) are chains bound to a
sequence. Our chain is a top-k of `TOP_K`, and a softmax if a draw depends on the weight of all
tokens. The token is chosen on the host (candidates.py), so that seeds and filters work as usual. If
the top k do not determine it, the full row is read from the device. To bind or unbind a chain,
llama.cpp reserves its graphs again, which takes a few milliseconds. So a sequence that recently
needed full rows gets no chain for a while.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.candidates import Rows, TopKChooser, TopRows, may_decide, needs_all_weights
from localllm_backends.values import Chunk, SequenceId

TOP_K = 256
# With fewer streams, reading full rows costs less than the work on the device. Once on, it stays on
# down to two streams. A draw that weighs all tokens is so costly on the host that one stream is
# enough.
_MIN_STREAMS = 4
_MIN_STREAMS_ON = 2
# Steps for which a sequence gets no sampler after it needed full rows.
_PATIENCE = 256


class _Chain:
    """The sampler chain of one sequence on a device.

    It keeps each row until the next step, weighs the tokens if `weigh_all`, and selects the top k.
    """

    def __init__(self, llama: Any, *, weigh_all: bool) -> None:
        self.weigh_all = weigh_all
        self._llama = llama
        # Tensors of the newest graph, which is also the one that ran last.
        self._row: int | None = None
        self._shares: int | None = None
        self.native = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        # Kept alive as long as llama.cpp may call them.
        self._interfaces: list[Any] = []
        self._add(self._custom(self._keep_row))
        self._add(llama.llama_sampler_init_top_k(TOP_K))
        if weigh_all:
            self._add(self._custom(self._weigh_candidates))

    def _add(self, sampler: Any) -> None:
        self._llama.llama_sampler_chain_add(self.native, sampler)

    def _custom(self, add_to_graph: Callable[[int, Any], None]) -> Any:
        """Return a sampler that adds operations to a graph. All devices support these
        operations."""
        llama = self._llama

        def apply(_sampler: Any, _tokens: Any) -> None:
            """No work on the host."""

        def backend_init(_sampler: Any, _buffer_type: Any, _outputs: Any) -> bool:
            return True

        def backend_apply(_sampler: Any, context: int, _graph: Any, data: Any) -> None:
            add_to_graph(context, data.contents)

        interface = llama.llama_sampler_i()
        functions = {
            "apply": apply,
            "backend_init": backend_init,
            "backend_apply": backend_apply,
        }
        for name, function in functions.items():
            setattr(interface, name, llama.field_type("llama_sampler_i", name)(function))
        self._interfaces.append(interface)
        return llama.llama_sampler_init(ctypes.byref(interface), None)

    def _keep_row(self, context: int, data: Any) -> None:
        n = self._llama.ggml_nelements(data.logits)
        reshaped = self._llama.ggml_reshape_2d
        column = reshaped(context, data.logits, n, 1)
        self._row = self._llama.ggml_cont(context, column)
        data.logits = self._row
        # As an output, its memory is not reused for other tensors.
        self._llama.ggml_set_output(self._row)
        if self.weigh_all:
            shares = self._llama.ggml_soft_max(context, self._row)
            self._shares = reshaped(context, shares, 1, n)

    def _weigh_candidates(self, context: int, data: Any) -> None:
        data.probs = self._llama.ggml_get_rows(context, self._shares, data.candidates)

    def row(self, n_vocab: int) -> Rows:
        """Return the row [1, n_vocab] of the last step, which must have finished."""
        row: Rows = np.empty((1, n_vocab), dtype=np.float32)
        self._llama.ggml_backend_tensor_get(self._row, row.ctypes.data, 0, row.nbytes)
        return row


class TopLogits:
    """Top-k selection for one context. It is used only if `enabled` is set."""

    def __init__(self, llama: Any, context: Any, n_vocab: int) -> None:
        self._llama = llama
        self._context = context
        self._n_vocab = n_vocab
        self._chains: dict[SequenceId, _Chain] = {}
        self._full_row_at: dict[SequenceId, int] = {}
        self._steps = 0
        self.enabled = False

    @staticmethod
    def exists(llama: Any) -> bool:
        """Return whether this llama.cpp has samplers on devices."""
        return not llama.missing("device_sampling")

    def prepare(self, chunks: Sequence[Chunk]) -> list[int]:
        """Prepare a step of `chunks`. Returns the indices of chunks whose top-k logits the device
        selects."""
        if not (self.enabled or self._chains) or self._n_vocab <= TOP_K:
            return []
        self._steps += 1
        outputs = [c for c in chunks if c.outputs]
        weigh_all = self._sortable(outputs)
        min_streams = _MIN_STREAMS_ON if self._chains else _MIN_STREAMS
        if not self.enabled or not (any(weigh_all.values()) or len(weigh_all) >= min_streams):
            weigh_all = {}
        self._rebind(weigh_all, {c.sequence for c in outputs})
        bound = weigh_all.keys() & self._chains.keys()
        return [i for i, chunk in enumerate(chunks) if chunk.sequence in bound]

    def _sortable(self, outputs: Sequence[Chunk]) -> dict[SequenceId, bool]:
        """Return the sequences that may use the top k.

        The value tells if the draw needs the weight of all tokens.
        """
        weigh_all: dict[SequenceId, bool] = {}
        for chunk in outputs:
            if not (chunk.top_k_suffices and may_decide(chunk.sample, TOP_K)):
                self._full_row_at[chunk.sequence] = self._steps
            full_row_at = self._full_row_at.get(chunk.sequence, -_PATIENCE)
            if self._steps - full_row_at >= _PATIENCE:
                weigh_all[chunk.sequence] = chunk.sample is not None and needs_all_weights(
                    chunk.sample
                )
        return weigh_all

    def _rebind(self, weigh_all: dict[SequenceId, bool], stepped: set[SequenceId]) -> None:
        """Bind chains to the sequences in `weigh_all`.

        Of the other sequences, those that are not in this step may keep their chains.
        """
        for sequence, chain in [*self._chains.items()]:
            idle = bool(weigh_all) and sequence not in stepped
            fits = sequence in weigh_all and chain.weigh_all >= weigh_all[sequence]
            if not (idle or fits):
                self.unbind(sequence)
        for sequence in weigh_all.keys() - self._chains.keys():
            self._bind(sequence, weigh_all=weigh_all[sequence])

    def _bind(self, sequence: SequenceId, *, weigh_all: bool) -> None:
        chain = _Chain(self._llama, weigh_all=weigh_all)
        if self._llama.llama_set_sampler(self._context, sequence, chain.native):
            self._chains[sequence] = chain
        else:
            self._llama.llama_sampler_free(chain.native)
            self.enabled = False

    def unbind(self, sequence: SequenceId) -> None:
        """Unbind the chain of a sequence, whose full rows are then copied again."""
        chain = self._chains.pop(sequence, None)
        if chain is not None:
            self._llama.llama_set_sampler(self._context, sequence, None)
            self._llama.llama_sampler_free(chain.native)

    def read(self, chunks: Sequence[Chunk], numbers: Sequence[int]) -> list[int | None]:
        """Return the next tokens of the chunks with these indices. Waits for the device."""
        llama = self._llama
        context = self._context
        # Work that needs no row, done while the device computes.
        chooser = TopKChooser(chunks, numbers)
        weighed = np.array([self._chains[chunks[i].sequence].weigh_all for i in numbers])
        counts = [(len(c.tokens), min(c.outputs, len(c.tokens))) for c in chunks]
        last = np.cumsum(counts, axis=0)[numbers] - 1
        ends, rows = last.T
        llama.llama_synchronize(context)
        if llama.llama_get_sampled_candidates_count_ith(context, int(ends[0])) != TOP_K:
            # This device leaves the selection to the host. Don't try again.
            self.enabled = False
            return [None] * len(chunks)

        def read(function: Any, kind: Any, which: NDArray[np.bool_]) -> Any:
            at = rows[which]
            first = function(context, int(ends[which][0]))
            read_rows = self._rows(first, kind, int(at[0]), int(at[-1]) + 1)
            return read_rows[at - at[0], :TOP_K]

        every = np.ones(len(numbers), dtype=np.bool_)
        totals = np.zeros(len(numbers))
        if weighed.any():
            shares = read(llama.llama_get_sampled_probs_ith, ctypes.c_float, weighed)
            totals[weighed] = 1.0 / shares.max(axis=1)
        ids = read(llama.llama_get_sampled_candidates_ith, ctypes.c_int32, every)
        logits = read(llama.llama_get_sampled_logits_ith, ctypes.c_float, every)
        return chooser.of(TopRows(ids, logits, totals))

    def _rows(self, first: Any, kind: Any, start: int, stop: int) -> Any:
        """Return a view of rows [start, stop), which llama.cpp stores `n_vocab` apart.

        `first` points to the first of them.
        """
        address = ctypes.cast(first, ctypes.c_void_p).value
        assert address is not None
        n_rows = stop - start
        buffer = (kind * (n_rows * self._n_vocab)).from_address(address)
        return np.frombuffer(buffer, dtype=np.dtype(kind)).reshape(n_rows, self._n_vocab)

    def row(self, sequence: SequenceId) -> Rows:
        """Return the full row [1, n_vocab] of the last step, if its top k were not sufficient."""
        self._llama.llama_synchronize(self._context)
        return self._chains[sequence].row(self._n_vocab)

    def close(self) -> None:
        for sequence in [*self._chains]:
            self.unbind(sequence)
