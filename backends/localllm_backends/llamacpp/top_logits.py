"""The greatest logits of each row, sorted out by the device that computed it: with several streams
whole rows need not cross.

llama.cpp's samplers on devices (llama.h: "backend sampling", experimental) are chains bound to a
sequence; ours are a top-k of `KEPT` and, where draws hang on the weight of all tokens, one that
says that. The choice is made here (candidates.py), so that seeds and filters hold; a row that the
few don't decide is read from the device. To bind or unbind a chain has llama.cpp reserve its graphs
anew, a few milliseconds: so a sequence whose rows were wanted whole lately is left as it is.
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
# With fewer streams reading whole rows costs less than what the device does for it; and once it is
# on it stays on for two. A draw that weighs all tokens costs the host so much that one stream is
# enough.
_FEWEST = 4
_FEWEST_ON = 2
# Steps; so long after its rows were wanted whole a sequence has no sampler.
_PATIENCE = 256


class _Chain:
    """What a device does with the rows of one sequence: it keeps each until the next step, `weighs`
    its tokens where that is asked for, and sorts out the greatest."""

    def __init__(self, llama: Any, *, weighs: bool) -> None:
        self.weighs = weighs
        self._llama = llama
        # Tensors of the graph that was built last, which is the one that ran last.
        self._row: int | None = None
        self._shares: int | None = None
        self.native = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        # As long as llama.cpp may call them.
        self._interfaces: list[Any] = []
        self._add(self._custom(self._keep_row))
        self._add(llama.llama_sampler_init_top_k(KEPT))
        if weighs:
            self._add(self._custom(self._weigh_candidates))

    def _add(self, sampler: Any) -> None:
        self._llama.llama_sampler_chain_add(self.native, sampler)

    def _custom(self, add_to_graph: Callable[[int, Any], None]) -> Any:
        """Return a sampler that adds operations to a graph, of those that every device has."""
        llama = self._llama

        def apply(_sampler: Any, _tokens: Any) -> None:
            """On the host there is nothing to do."""

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
        # Nothing else is written where it lies.
        ggml_function("ggml_set_output")(self._row)
        if self.weighs:
            shares = ggml_function("ggml_soft_max")(context, self._row)
            self._shares = reshaped(context, shares, 1, n)

    def _weigh_candidates(self, context: int, data: Any) -> None:
        data.probs = ggml_function("ggml_get_rows")(context, self._shares, data.candidates)

    def row(self, n_vocab: int) -> Rows:
        """The row [1, n_vocab] of the last step, which is done."""
        row: Rows = np.empty((1, n_vocab), dtype=np.float32)
        ggml_function("ggml_backend_tensor_get")(self._row, row.ctypes.data, 0, row.nbytes)
        return row


class TopLogits:
    """Of one context, where that is `able` to: told so, and not found otherwise."""

    def __init__(self, llama: Any, context: Any, n_vocab: int) -> None:
        self._llama = llama
        self._context = context
        self._n_vocab = n_vocab
        self._chains: dict[SequenceId, _Chain] = {}
        self._whole_at: dict[SequenceId, int] = {}
        self._steps = 0
        self.able = False

    def prepare(self, chunks: Sequence[Chunk]) -> list[int]:
        """Before a step of `chunks`: the numbers of those whose rows are sorted out."""
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
        """Return the sequences whose rows may be sorted out, and for each whether its draw needs
        the weight of all tokens."""
        weighs: dict[SequenceId, bool] = {}
        for chunk in outputs:
            if not (chunk.few and may_decide(chunk.sample, KEPT)):
                self._whole_at[chunk.sequence] = self._steps
            whole_at = self._whole_at.get(chunk.sequence, -_PATIENCE)
            if self._steps - whole_at >= _PATIENCE:
                weighs[chunk.sequence] = chunk.sample is not None and unlimited(chunk.sample)
        return weighs

    def _rebind(self, weighs: dict[SequenceId, bool], stepped: set[SequenceId]) -> None:
        """Give the sequences in `weighs` their chains. Of others those may keep them that are not
        stepped now."""
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
        """Its rows come whole again."""
        chain = self._chains.pop(sequence, None)
        if chain is not None:
            self._llama.llama_set_sampler(self._context, sequence, None)
            self._llama.llama_sampler_free(chain.native)

    def read(self, chunks: Sequence[Chunk], numbers: Sequence[int]) -> list[int | None]:
        """The tokens behind the chunks with these numbers; waits for the device."""
        llama = self._llama
        context = self._context
        # All that needs no row, while the device computes.
        chooser = FewChooser(chunks, numbers)
        weighed = np.array([self._chains[chunks[i].sequence].weighs for i in numbers])
        counts = [(len(c.tokens), min(c.outputs, len(c.tokens))) for c in chunks]
        last = np.cumsum(counts, axis=0)[numbers] - 1
        ends, rows = last.T
        llama.llama_synchronize(context)
        if llama.llama_get_sampled_candidates_count_ith(context, int(ends[0])) != KEPT:
            # This device leaves it to the host, and so do we from here on.
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
        """A view of rows [start, stop), `n_vocab` apart as llama.cpp keeps them, of which this is
        the first."""
        address = ctypes.cast(first, ctypes.c_void_p).value
        assert address is not None
        n_rows = stop - start
        buffer = (kind * (n_rows * self._n_vocab)).from_address(address)
        return np.frombuffer(buffer, dtype=np.dtype(kind)).reshape(n_rows, self._n_vocab)

    def row(self, sequence: SequenceId) -> Rows:
        """The whole row [1, n_vocab] of the last step, which the few did not do for."""
        self._llama.llama_synchronize(self._context)
        return self._chains[sequence].row(self._n_vocab)

    def close(self) -> None:
        for sequence in [*self._chains]:
            self.unbind(sequence)
