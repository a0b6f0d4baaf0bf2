"""Measure the precision loss of KV types on the loaded weights.

The same text is computed with each type and with f16, a few tokens at a time, in small contexts
that share the weights. Logit rows are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from localllm_backends.contract import BackendFailure, KvFidelity, LoadError, LoadSpec
from localllm_backends.llamacpp.batch import Batch, Decoder
from localllm_backends.llamacpp.context import trial_context
from localllm_backends.logit_losses import Rows, fidelity, log_probabilities, losses

# Rows of logits per step: 16 rows of a vocabulary of 262,144 take 17 MB in each context.
PIECE_TOKENS = 16


def compared(
    llama: Any,
    model: Any,
    spec: LoadSpec,
    pairs: Sequence[tuple[str, str]],
    tokens: Sequence[int],
) -> tuple[KvFidelity, ...]:
    """Compare pairs of KV types with f16 over `tokens`. Pairs that the model does not support are
    left out.

    Raises BackendFailure if a step fails.
    """
    sizes = {"n_ctx": len(tokens), "n_batch": PIECE_TOKENS, "n_outputs": PIECE_TOKENS}
    batch = Batch(llama, PIECE_TOKENS)
    with ExitStack() as opened:
        f16 = opened.enter_context(trial_context(model, spec, ("f16", "f16"), **sizes))
        exact = Decoder(llama, f16)
        decoders: dict[tuple[str, str], Decoder] = {}
        for pair in pairs:
            with suppress(LoadError):  # rows are no multiple of a block, or there is no kernel
                context = opened.enter_context(trial_context(model, spec, pair, **sizes))
                decoders[pair] = Decoder(llama, context)
        # For each token: the divergence, and whether the best token differs.
        found: dict[tuple[str, str], list[Rows]] = {pair: [] for pair in decoders}
        for at in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[at : at + PIECE_TOKENS]
            right = _log_probabilities(exact, batch, at, piece)
            for pair, decoder in decoders.items():
                near = _log_probabilities(decoder, batch, at, piece)
                found[pair].append(losses(right, near))
    return tuple(fidelity(pair, rows) for pair, rows in found.items())


def _log_probabilities(decoder: Decoder, batch: Batch, at: int, piece: Sequence[int]) -> Rows:
    """Return the log probabilities after each token of `piece`, which starts at `at`: [tokens,
    vocabulary]."""
    batch.clear()
    batch.add(0, at, piece, len(piece))
    code = decoder.decode(batch.native)
    if code:
        raise BackendFailure(
            f"llama_decode failed with code {code} during the comparison of KV types"
        )
    return log_probabilities(decoder.logits(len(piece)))
