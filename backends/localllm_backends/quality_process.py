"""Measure a model on a text, alone or against a reference, in a process of its own.

    python -m localllm_backends.quality_process

The order (order_process.py) has `subject` and `reference` (or null), each with `engine` and `spec`,
the fields of LoadSpec; `text`; `block_tokens`; `most_blocks`; and `store`: a folder for the
reference's probabilities, if the two models do not fit in memory together ("": they do).

The text is cut into blocks. Each block starts with an empty context, and with the BOS token if the
model has one. Only its second half is evaluated, as in llama-perplexity. The blocks are measured in
an order in which the first ones are spread over the text. Messages:

    {"differs": "…"}            the models read the text as other tokens: only the subject is measured
    {"bos": N, "reference_bos": N}    the BOS tokens (or null), if they differ
    {"stored": N, "of": M}      blocks of the reference that were stored
    {"blocks": N}               blocks that will be measured
    {"tokens": N, "nll": X, "reference_nll": X, "kl": X, "same_top": N}    sums over one block
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import BackendFailure, Chunk, LoadSpec
from localllm_backends.order_process import Order, Send, backend_named, run_order

# Tokens in a step: logits of 128 tokens of a vocabulary of 262,144 take 134 MB.
_STEP_TOKENS = 128
# Rows whose probabilities are computed at once in float64.
_ROWS = 16
# A finite number in place of logits of minus infinity.
_LOWEST_FINITE = -1e30

LogRows: TypeAlias = NDArray[np.floating[Any]]


class TextModel(Protocol):
    """A source of log probabilities for the blocks of a text.

    `tokens`: the text without BOS. `bos`: the token at the start of each block, if any.
    """

    tokens: list[int]
    bos: int | None

    def rows(self, number: int, block: Sequence[int]) -> Iterator[LogRows]:
        """Yield log probabilities [tokens, vocabulary] after each token of the second half of
        block `number`, except the last, in pieces of at most `_ROWS` rows."""

    def close(self) -> None: ...


class LoadedModel:
    """A TextModel in memory."""

    def __init__(self, named: dict[str, Any], order: Order) -> None:
        block_tokens = order["block_tokens"]
        spec = replace(
            LoadSpec.from_json(named["spec"]),
            n_ctx=block_tokens,
            n_seq_max=1,
            n_batch=_STEP_TOKENS,
            n_outputs=_STEP_TOKENS,
        )
        self._backend = backend_named(named["engine"]).load(spec)
        self._first = block_tokens // 2
        self.tokens = self._backend.tokenize(order["text"], special=False)
        info = self._backend.info
        self.bos = info.bos_token if info.adds_bos else None

    def rows(self, number: int, block: Sequence[int]) -> Iterator[LogRows]:
        tokens = list(block)
        if self.bos is not None:
            tokens[0] = self.bos
        sequence = self._backend.new_sequence()
        try:
            for start in range(0, len(tokens), _STEP_TOKENS):
                piece = tokens[start : start + _STEP_TOKENS]
                outputs = min(len(piece), max(0, start + len(piece) - self._first))
                step = self._backend.step([Chunk(sequence, piece, outputs)])
                if outputs:
                    # The last token of a block has no next token.
                    is_last = start + len(piece) == len(tokens)
                    logits = step.logits(0)[: outputs - is_last]
                    for at in range(0, len(logits), _ROWS):
                        yield _log_probabilities(logits[at : at + _ROWS])
        finally:
            self._backend.drop(sequence)

    def close(self) -> None:
        self._backend.close()


class StoredModel:
    """A TextModel whose log probabilities were stored in `folder`, in float16."""

    def __init__(
        self, model: LoadedModel, folder: Path, chosen: Sequence[int], order: Order, send: Send
    ) -> None:
        self.tokens = model.tokens
        self.bos = model.bos
        self._folder = folder
        blocks = blocks_of(model, order["block_tokens"])
        for n_stored, number in enumerate(chosen):
            pieces = [rows.astype(np.float16) for rows in model.rows(number, blocks[number])]
            np.save(self._file(number), np.concatenate(pieces))
            send({"stored": n_stored + 1, "of": len(chosen)})

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.npy"

    def rows(self, number: int, block: Sequence[int]) -> Iterator[LogRows]:
        stored = np.load(self._file(number), mmap_mode="r")
        for at in range(0, len(stored), _ROWS):
            yield stored[at : at + _ROWS].astype(np.float64)

    def close(self) -> None:
        pass


def _log_probabilities(logits: NDArray[np.float32]) -> LogRows:
    values = np.maximum(logits.astype(np.float64), _LOWEST_FINITE)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


def blocks_of(model: TextModel, block_tokens: int) -> list[list[int]]:
    """Cut the text into whole blocks. Raises BackendFailure if it has not even one."""
    tokens = model.tokens
    if model.bos is not None:
        tokens = [model.bos, *tokens]
    n_blocks = len(tokens) // block_tokens
    if not n_blocks:
        raise BackendFailure(
            f"the text has {len(tokens)} tokens, fewer than one block of {block_tokens}",
            "give a longer text, or a smaller --block",
        )
    return [tokens[n * block_tokens : (n + 1) * block_tokens] for n in range(n_blocks)]


def spread(n: int) -> list[int]:
    """Return 0 … n-1 in an order of which any beginning is spread evenly: 0, n/2, n/4, 3n/4 …"""
    bits = max(1, (n - 1).bit_length())
    reversed_numbers = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [number for number in reversed_numbers if number < n]


def _block_sums(
    subject: TextModel, reference: TextModel | None, number: int, block: list[int]
) -> dict[str, float]:
    """Return the sums over the evaluated tokens of a block, as in the module's docstring."""
    sums = {"tokens": 0.0, "nll": 0.0, "reference_nll": 0.0, "kl": 0.0, "same_top": 0.0}
    # The tokens that follow the evaluated ones.
    following = np.array(block[len(block) // 2 + 1 :])
    done = 0
    pieces: Iterator[LogRows | None] = repeat(None)
    if reference is not None:
        pieces = reference.rows(number, block)
    for rows, right in zip(subject.rows(number, block), pieces, strict=False):
        n = len(rows)
        targets = following[done : done + n]
        done += n
        sums["tokens"] += n
        sums["nll"] -= float(rows[np.arange(n), targets].sum())
        if right is not None:
            # A vocabulary may be padded with tokens that no text has.
            width = min(rows.shape[1], right.shape[1])
            near = rows[:, :width]
            exact = right[:, :width]
            sums["reference_nll"] -= float(exact[np.arange(n), targets].sum())
            sums["kl"] += float((np.exp(exact) * (exact - near)).sum())
            sums["same_top"] += int((near.argmax(axis=1) == exact.argmax(axis=1)).sum())
    return sums


def measure(order: Order, send: Send) -> None:
    """Measure the order's models block by block. Raises BackendFailure."""
    block_tokens = order["block_tokens"]
    with ExitStack() as opened:
        reference: TextModel | None = None
        if order["reference"] is not None:
            loaded = LoadedModel(order["reference"], order)
            if order["store"]:
                with closing(loaded):
                    n = len(blocks_of(loaded, block_tokens))
                    chosen = spread(n)[: order["most_blocks"]]
                    reference = StoredModel(loaded, Path(order["store"]), chosen, order, send)
            else:
                reference = opened.enter_context(closing(loaded))
        subject = opened.enter_context(closing(LoadedModel(order["subject"], order)))
        blocks = blocks_of(reference or subject, block_tokens)
        if reference is not None and reference.tokens != subject.tokens:
            send({"differs": _difference(reference.tokens, subject.tokens)})
            reference = None
            blocks = blocks_of(subject, block_tokens)
        if reference is not None and reference.bos != subject.bos:
            send({"bos": subject.bos, "reference_bos": reference.bos})
        chosen = spread(len(blocks))[: order["most_blocks"]]
        send({"blocks": len(chosen)})
        for number in chosen:
            send(_block_sums(subject, reference, number, blocks[number]))


def _difference(theirs: list[int], ours: list[int]) -> str:
    """Describe where two lists of tokens differ first."""
    pairs = zip(theirs, ours, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(theirs), len(ours)))
    return f"{len(ours)} and {len(theirs)} tokens, different from token {at + 1} on"


if __name__ == "__main__":
    sys.exit(run_order(measure))
