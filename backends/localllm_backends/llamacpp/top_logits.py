"""Select the top-k logits of each row on the device, so that full rows need not be copied with
several streams.

llama.cpp's samplers on devices (llama.h: "backend sampling", experimental) are chains bound to a
sequence. Our chain is a top-k of `KEPT`, and a softmax if a draw depends on the weight of all
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

from localllm_backends.candidates import FewChooser, Rows, TopRows, may_decide, unlimited
from localllm_backends.llamacpp.native import ggml_function
from localllm_backends.values import Chunk, SequenceId

KEPT = 256
# With fewer streams, reading full rows costs less than the work on the device. Once on, it stays on
# down to two streams. A draw that weighs all tokens is so costly on the host that one stream is
# enough.
_FEWEST = 4
_FEWEST_ON = 2
# Steps for which a sequence gets no sampler after it needed full rows.
_PATIENCE = 256


class _Chain:
    """The sampler chain of one sequence on a device.

    It keeps each row until the next step, weighs the tokens if `weighs`, and selects the top k.
    """

    def __init__(self, llama: Any, *, weighs: bool) -> None:
        self.weighs = weighs
        self._llama = llama
        # Tensors of the newest graph, which is also the one that ran last.
        self._row: int | None = None
        self._shares: int | None = None
        self.native = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        # Kept alive as long as llama.cpp may call them.
        self._interfaces: list[Any] = []
        self._add(self._custom(self._keep_row))
        self._add(llama.llama_sampler_init_top_k(KEPT))
        if weighs:
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

        interface = llama.llama_sampler_i(
            apply=llama.llama_sampler_i_apply(apply),
            backend_init=llama.llama_sampler_i_backend_init(backend_init),
            backend_apply=llama.llama_sampler_i_backend_apply(backend_apply),
        )
        self._interfaces.append(interface)
        return llama.llama_sampler_init(ctypes.byref(interface), None)

    def _keep_row(self, context: int, data: Any) -> None:
        n = ggml_function("ggml_nelements")(data.logits)
        reshaped = ggml_function("ggml_reshape_2d")
        column = reshaped(context, data.logits, n, 1)
        self._row = ggml_function("ggml_cont")(context, column)
        data.logits = self._row
        # As an output, its memory is not reused for other tensors.
        ggml_function("ggml_set_output")(self._row)
        if self.weighs:
            shares = ggml_function("ggml_soft_max")(context, self._row)
            self._shares = reshaped(context, shares, 1, n)

    def _weigh_candidates(self, context: int, data: Any) -> None:
        data.probs = ggml_function("ggml_get_rows")(context, self._shares, data.candidates)

    def row(self, n_vocab: int) -> Rows:
        """Return the row [1, n_vocab] of the last step, which must have finished."""
        row: Rows = np.empty((1, n_vocab), dtype=np.float32)
        ggml_function("ggml_backend_tensor_get")(self._row, row.ctypes.data, 0, row.nbytes)
        return row


class TopLogits:
    """Top-k selection for one context. It is used only if `able` is set."""

    def __init__(self, llama: Any, context: Any, n_vocab: int) -> None:
        self._llama = llama
        self._context = context
        self._n_vocab = n_vocab
        self._chains: dict[SequenceId, _Chain] = {}
        self._whole_at: dict[SequenceId, int] = {}
        self._steps = 0
        self.able = False

    def prepare(self, chunks: Sequence[Chunk]) -> list[int]:
        """Prepare a step of `chunks`. Returns the indices of chunks whose top-k logits the device
        selects."""
        if not (self.able or self._chains) or self._n_vocab <= KEPT:
            return []
        self._steps += 1
        outputs = [c for c in chunks if c.outputs]
        weighs = self._sortable(outputs)
        fewest = _FEWEST_ON if self._chains else _FEWEST
        if not self.able or not (any(weighs.values()) or len(weighs) >= fewest):
            weighs = {}
        self._rebind(weighs, {c.sequence for c in outputs})
        bound = weighs.keys() & self._chains.keys()
        return [i for i, chunk in enumerate(chunks) if chunk.sequence in bound]

    def _sortable(self, outputs: Sequence[Chunk]) -> dict[SequenceId, bool]:
        """Return the sequences that may use the top k.

        The value tells if the draw needs the weight of all tokens.
        """
        weighs: dict[SequenceId, bool] = {}
        for chunk in outputs:
            if not (chunk.few and may_decide(chunk.sample, KEPT)):
                self._whole_at[chunk.sequence] = self._steps
            whole_at = self._whole_at.get(chunk.sequence, -_PATIENCE)
            if self._steps - whole_at >= _PATIENCE:
                weighs[chunk.sequence] = chunk.sample is not None and unlimited(chunk.sample)
        return weighs

    def _rebind(self, weighs: dict[SequenceId, bool], stepped: set[SequenceId]) -> None:
        """Bind chains to the sequences in `weighs`.

        Of the other sequences, those that are not in this step may keep their chains.
        """
        for sequence, chain in [*self._chains.items()]:
            idle = bool(weighs) and sequence not in stepped
            fits = sequence in weighs and chain.weighs >= weighs[sequence]
            if not (idle or fits):
                self.unbind(sequence)
        for sequence in weighs.keys() - self._chains.keys():
            self._bind(sequence, weighs=weighs[sequence])

    def _bind(self, sequence: SequenceId, *, weighs: bool) -> None:
        chain = _Chain(self._llama, weighs=weighs)
        if self._llama.llama_set_sampler(self._context, sequence, chain.native):
            self._chains[sequence] = chain
        else:
            self._llama.llama_sampler_free(chain.native)
            self.able = False

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
        chooser = FewChooser(chunks, numbers)
        weighed = np.array([self._chains[chunks[i].sequence].weighs for i in numbers])
        counts = [(len(c.tokens), min(c.outputs, len(c.tokens))) for c in chunks]
        last = np.cumsum(counts, axis=0)[numbers] - 1
        ends, rows = last.T
        llama.llama_synchronize(context)
        if llama.llama_get_sampled_candidates_count_ith(context, int(ends[0])) != KEPT:
            # This device leaves the selection to the host. Don't try again.
            self.able = False
            return [None] * len(chunks)

        def read(function: Any, kind: Any, which: NDArray[np.bool_]) -> Any:
            at = rows[which]
            first = function(context, int(ends[which][0]))
            read_rows = self._rows(first, kind, int(at[0]), int(at[-1]) + 1)
            return read_rows[at - at[0], :KEPT]

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
