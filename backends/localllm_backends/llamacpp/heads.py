"""Draft heads on llama.cpp: a second context that reads the model's tokens and hidden rows, and
drafts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from localllm_backends.contract import Chunk, SequenceId
from localllm_backends.draft_head_state import CANDIDATES, StatefulDraftHeads
from localllm_backends.llamacpp.batch import Decoder, Rows, floats
from localllm_backends.llamacpp.kv_blocks import SequenceMemory


class DraftHeads(StatefulDraftHeads[Rows]):
    """A second context that follows the model's context.

    It reads the inputs of these `layers` of the model for each token, concatenated. None means the
    output of the last layer, the hidden row.
    """

    def __init__(
        self, llama: Any, target: Any, context: Any, layers: Sequence[int | None] = (None,)
    ) -> None:
        super().__init__(int(llama.llama_n_batch(context)))
        self._llama = llama
        self._context = context
        self._memory = SequenceMemory(llama, context)
        model = llama.llama_get_model(target)
        own = llama.llama_get_model(context)
        # The drafter's own model, unless the heads are part of the main model.
        self._drafter: Any = None
        self.weights_bytes = 0
        if own != model:
            self._drafter = own
            self.weights_bytes = int(llama.llama_model_size(own))
        self._n_hidden = int(llama.llama_model_n_embd_out(own))
        self._decoder = Decoder(llama, context)
        # For each part of a row: a function that returns a pointer to it, and its width.
        self._given: list[tuple[Callable[[], Any], int]] = []
        for layer in layers:
            if layer is None:
                llama.llama_set_embeddings_nextn(target, True, False)
                width = int(llama.llama_model_n_embd_out(model))
                self._given.append((partial(llama.llama_get_embeddings_nextn, target), width))
            else:
                llama.llama_set_embeddings_layer_inp(target, layer, True)
                width = int(llama.llama_model_n_embd(model))
                rows = partial(llama.llama_get_embeddings_layer_inp, target, layer)
                self._given.append((rows, width))
        self._width = sum(width for _, width in self._given)

    def _hidden(self, n: int) -> Rows:
        """Return the first `n` hidden rows of the heads' last llama_decode. The next one overwrites
        them."""
        rows = self._llama.llama_get_embeddings_nextn(self._context)
        return floats(rows, n, self._n_hidden)

    # --- following the model ----------------------------------------------------------------------

    def stepped(self, chunks: Sequence[Chunk]) -> None:
        """Store the rows of `chunks`, which the model has just read in one llama_decode."""
        if self.resting:
            self.follow(chunks, [[]] * len(chunks))
            return
        n_tokens = sum(len(chunk.tokens) for chunk in chunks)
        given = [floats(rows_of(), n_tokens, width) for rows_of, width in self._given]
        rows = np.concatenate(given, axis=1)
        rows_of_chunks = []
        begin = 0
        for chunk in chunks:
            end = begin + len(chunk.tokens)
            rows_of_chunks.append(list(rows[begin:end].copy()))
            begin = end
        self.follow(chunks, rows_of_chunks)

    def _cut(self, sequence: SequenceId, n_tokens: int) -> None:
        self._memory.cut(sequence, n_tokens)

    def _restart(self, sequence: SequenceId, n_tokens: int) -> None:
        self._memory.cut(sequence)

    def _copy(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        self._memory.copy(source, target, 0, n_tokens)

    def _detached(self, row: Rows) -> Rows:
        return row.copy()

    def _zero_row(self) -> Rows:
        return np.zeros(self._width, dtype=np.float32)

    # --- export and import ------------------------------------------------------------------------

    def export_range(self, sequence: SequenceId, start: int, stop: int, via: int) -> bytes:
        """Return the heads' KV of tokens [start, stop).

        A part of the sequence is exported through the empty sequence `via`.
        """
        self.catch_up([sequence])
        return self._memory.export(sequence, start, stop, via)

    def import_range(
        self, sequence: SequenceId, data: memoryview, start: int, stop: int, via: int
    ) -> None:
        """Append tokens [start, stop) from the data of `export_range`."""
        self.catch_up([sequence])
        with self._importing(sequence, stop):
            self._memory.append(sequence, data, start, stop, via, range(stop, sys.maxsize))

    def free(self) -> None:
        self._llama.llama_free(self._context)
        if self._drafter is not None:
            self._llama.llama_model_free(self._drafter)


def best(logits: Rows) -> tuple[int, float]:
    """Return the best token and its probability among the ten best."""
    n = min(CANDIDATES, len(logits))
    top = np.argpartition(logits, -n)[-n:]
    values = logits[top].astype(np.float64)
    at = int(values.argmax())
    probability = 1.0 / np.exp(values - values[at]).sum()
    return int(top[at]), float(probability)
