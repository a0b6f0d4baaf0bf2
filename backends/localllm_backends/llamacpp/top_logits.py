"""The greatest logits of each row, sorted out by the device that computed it: with several streams whole rows need not cross.

llama.cpp's samplers on devices (llama.h: "backend sampling", experimental) are chains bound to a sequence; ours is a top-k of
`KEPT`, the choice among those is made here (candidates.py), so that seeds and filters hold. To bind or unbind one has
llama.cpp reserve its graphs anew, a few milliseconds: so a sequence whose rows were wanted whole lately is left as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import numpy as np

from localllm_backends.candidates import Rows, TopRows, choose_few, may_decide, unlimited
from localllm_backends.values import Chunk, SequenceId

KEPT = 256
# With fewer streams reading whole rows costs less than what the device does for it; and once it is on it stays on for two.
_FEWEST, _FEWEST_ON = 4, 2
# Steps; so long after its rows were wanted whole a sequence has no sampler.
_PATIENCE = 256


class TopLogits:
    """Of one context, where that is `able` to: told so, and not found otherwise."""

    def __init__(self, llama: Any, context: Any, n_vocab: int) -> None:
        self._llama, self._context, self._n_vocab = llama, context, n_vocab
        self._chains: dict[SequenceId, Any] = {}
        self._whole: dict[SequenceId, int] = {}
        self._steps = 0
        self.able = False

    def prepare(self, chunks: Seq[Chunk]) -> list[int]:
        """Before a step of `chunks`: the numbers of those whose rows are sorted out."""
        if not (self.able or self._chains) or self._n_vocab <= KEPT:
            return []
        self._steps += 1
        outputs = [(i, c) for i, c in enumerate(chunks) if c.outputs]
        for _, chunk in outputs:
            whole = chunk.sample is not None and unlimited(chunk.sample)
            if whole or not (chunk.few and may_decide(chunk.sample, KEPT)):
                self._whole[chunk.sequence] = self._steps
        fit = [(i, c.sequence) for i, c in outputs if self._calm(c.sequence)]
        if not self.able or len(fit) < (_FEWEST_ON if self._chains else _FEWEST):
            fit = []
        wanted = {sequence for _, sequence in fit}
        for sequence in [
            s for s in self._chains if s not in wanted and (not fit or any(c.sequence == s for _, c in outputs))
        ]:
            self.unbind(sequence)
        for sequence in wanted - self._chains.keys():
            self._bind(sequence)
        return [i for i, sequence in fit if sequence in self._chains]

    def _calm(self, sequence: SequenceId) -> bool:
        return self._steps - self._whole.get(sequence, -_PATIENCE) >= _PATIENCE

    def _bind(self, sequence: SequenceId) -> None:
        llama = self._llama
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_k(KEPT))
        if llama.llama_set_sampler(self._context, sequence, chain):
            self._chains[sequence] = chain
        else:
            llama.llama_sampler_free(chain)
            self.able = False

    def unbind(self, sequence: SequenceId) -> None:
        """Its rows come whole again."""
        if (chain := self._chains.pop(sequence, None)) is not None:
            self._llama.llama_set_sampler(self._context, sequence, None)
            self._llama.llama_sampler_free(chain)

    def read(self, chunks: Seq[Chunk], numbers: Seq[int]) -> list[int | None]:
        """The tokens behind the chunks with these numbers; waits for the device."""
        llama, context = self._llama, self._context
        llama.llama_synchronize(context)
        ends, rows = np.cumsum([[len(c.tokens), min(c.outputs, len(c.tokens))] for c in chunks], axis=0)[numbers].T - 1
        if llama.llama_get_sampled_candidates_count_ith(context, int(ends[0])) != KEPT:
            # This device leaves it to the host, and so do we from here on.
            self.able = False
            return [None] * len(chunks)
        found = [
            self._rows(read(context, int(ends[0])), kind, int(rows[0]), int(rows[-1]) + 1)[rows - rows[0], :KEPT]
            for read, kind in (
                (llama.llama_get_sampled_candidates_ith, ctypes.c_int32),
                (llama.llama_get_sampled_logits_ith, ctypes.c_float),
            )
        ]
        return choose_few(TopRows(*found), chunks, numbers)

    def _rows(self, first: Any, kind: Any, start: int, stop: int) -> Any:
        """A view of rows [start, stop), `n_vocab` apart as llama.cpp keeps them, of which this is the first."""
        address = ctypes.cast(first, ctypes.c_void_p).value
        assert address is not None
        buffer = (kind * ((stop - start) * self._n_vocab)).from_address(address)
        return np.frombuffer(buffer, dtype=np.dtype(kind)).reshape(stop - start, self._n_vocab)

    def wanted_whole(self, sequence: SequenceId) -> None:
        """The few did not do."""
        self._whole[sequence] = self._steps
        self.unbind(sequence)

    def close(self) -> None:
        for sequence in [*self._chains]:
            self.unbind(sequence)


class SortedOut:
    """The rows of one step that the device sorted out: of the chunks with these `numbers`."""

    def __init__(self, top: TopLogits, chunks: Seq[Chunk], numbers: list[int], again: Callable[[Chunk], Rows]) -> None:
        self._top, self._chunks, self.numbers, self._again = top, chunks, numbers, again
        self._rows: dict[int, Rows] = {}

    @cached_property
    def _tokens(self) -> list[int | None]:
        return self._top.read(self._chunks, self.numbers)

    def token(self, chunk: int) -> int | None:
        """What was chosen for it; None where the few don't decide it."""
        return self._tokens[chunk]

    def row(self, chunk: int) -> Rows:
        """Its row [1, n_vocab] all the same, which is computed again."""
        if chunk not in self._rows:
            # The others' few are read before.
            _ = self._tokens
            self._top.wanted_whole(self._chunks[chunk].sequence)
            self._rows[chunk] = self._again(self._chunks[chunk]).copy()
        return self._rows[chunk]
