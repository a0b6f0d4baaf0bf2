"""DFlash, DFlash2 and DSpark on MLX: a few layers that fill in a block of masked tokens in one
pass, with mlx-vlm's weights and layers.

Their KV is computed from the features of tokens that the model has read. Tokens of the block attend
to it and to each other. DSpark's Markov head and DFlash2's selector choose the tokens one after
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from localllm_backends.contract import SequenceId
from localllm_backends.draft_head_state import CANDIDATES, MIN_PROBABILITY
from localllm_backends.drafter_config import DSPARK_DESIGNS, DrafterConfig
from localllm_backends.mlx.draft_heads import HeadMemory, joined, share_of_best
from localllm_backends.mlx.draft_target import Target, TrainedModule, check_ids, read_module
from localllm_backends.mlx.files import fingerprint
from localllm_backends.mlx.stepping import Stepper

# mlx-vlm's package for each design.
_PACKAGES = {
    "dflash": "qwen3_dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
    "gemma4_dspark": "gemma4_dspark",
}
# The mask of Gemma 4's drafters, whose configs need not name it.
_GEMMA4_MASK = 4


class _BlockAttention(nn.Module):  # type: ignore[misc]
    """mlx-vlm's attention of such a layer, for rows of different lengths in our memory."""

    def __init__(self, attention: Any, window: int, *, causal: bool) -> None:
        super().__init__()
        self.attention = attention
        self._window = window or None
        self._causal = causal

    def append(self, context: Any, rope: Any, cache: Any) -> tuple[Any, Any]:
        """Append keys and values of `context` [rows, n, width] to `cache`, and return all of
        them."""
        keys, values = self._keys_and_values(context)
        keys_values: tuple[Any, Any] = cache.update_and_fetch(
            rope(keys, offset=cache.offset), values
        )
        return keys_values

    def __call__(self, x: Any, context: Any, rope: Any, cache: Any, _: Any = None) -> Any:
        """Attend from the block `x` [rows, block, width] to all context and to the block.

        `context` [rows, 1, width] is the newest row, which is not in `cache` yet.
        """
        attention = self.attention
        rows, block, _ = x.shape
        at = cache.offset + 1
        queries = attention.q_norm(attention.q_proj(x).reshape(rows, block, attention.n_heads, -1))
        queries = rope(queries.transpose(0, 2, 1, 3), offset=at)
        new_keys, new_values = self._keys_and_values(x)
        # The mask for the newest row is the one for the block too.
        seen = cache.make_mask(1, return_array=True, window_size=self._window)
        keys, values = self.append(context, rope, cache)
        out = mx.fast.scaled_dot_product_attention(
            queries,
            mx.concatenate([keys, rope(new_keys, offset=at)], axis=2),
            mx.concatenate([values, new_values], axis=2),
            scale=attention.scale,
            mask=self._mask(seen, int(keys.shape[2]), block),
            sinks=attention.attention_sink_bias,
        )
        return attention.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, block, -1))

    def _keys_and_values(self, x: Any) -> tuple[Any, Any]:
        attention = self.attention
        shape = (*x.shape[:2], attention.n_kv_heads, -1)
        projected = attention.k_proj(x)
        keys = attention.k_norm(projected.reshape(shape)).transpose(0, 2, 1, 3)
        # Gemma 4's layers of full attention have one projection for both.
        values = projected
        if "v_proj" in attention:
            values = attention.v_proj(x)
        return keys, values.reshape(shape).transpose(0, 2, 1, 3)

    def _mask(self, seen: Any, n_context: int, block: int) -> Any:
        """Return the mask of a block: `seen` [rows, 1, 1, context] (None: all), then the block."""
        if seen is None and not self._causal:
            return None
        if seen is None:
            seen = mx.ones((1, 1, 1, n_context), dtype=mx.bool_)
        among = mx.ones((block, block), dtype=mx.bool_)
        if self._causal:
            among = mx.tril(among)
        n_rows = int(seen.shape[0])
        before = mx.broadcast_to(seen, (n_rows, 1, block, n_context))
        return mx.concatenate([before, mx.broadcast_to(among, (n_rows, 1, block, block))], axis=-1)


class _BestTokens:
    """mlx-vlm's sampler: takes the best token and keeps its probability among the candidates."""

    def __init__(self, candidates: int = CANDIDATES) -> None:
        self._candidates = candidates
        self.shares: list[Any] = []

    def __call__(self, logits: Any) -> Any:
        self.shares.append(share_of_best(logits, self._candidates))
        return mx.argmax(logits, axis=-1)

    def sample_proposal(self, scores: Any) -> Any:
        return self(scores)


class DflashModule(TrainedModule):
    """See DraftModule."""

    kind: ClassVar[str] = "dflash"

    def __init__(self, weights: Any, drafter: DrafterConfig, target: Target, mark: str) -> None:
        super().__init__(weights, target, drafter.layers, mark)
        self._design = drafter.design
        self.longest = drafter.block - 1
        if weights.embed_tokens is None:
            weights.embed_tokens = target.embeddings
            weights.embed_scale = target.embed_scale
        if weights.lm_head is None:
            weights.lm_head = target.output
        self._n_rows = drafter.block
        # DSpark's first draft token is at the place of the newest token, unless trained otherwise.
        self._begin = 1
        if drafter.design in DSPARK_DESIGNS and weights.config.sample_from_anchor:
            self._n_rows -= 1
            self._begin = 0

    def open(self, stepper: Stepper, identity: str, n_batch: int) -> BlockHeads:
        return BlockHeads(self, stepper, identity, n_batch=n_batch)

    def _context(self, rows: Any) -> Any:
        weights = self._weights
        return weights.hidden_norm(weights.fc(rows.astype(weights.norm.weight.dtype)))

    def __call__(self, tokens: Any, rows: Any, caches: Sequence[Any]) -> Any:
        """Read the model's `rows` [sequences, n, width]; `tokens` do not matter."""
        context = self._context(rows)
        for layer, cache in zip(self._weights.layers, caches, strict=True):
            layer.self_attn.append(context, self._weights.rope, cache)
        return context

    def block(self, newest: Any, rows: Any, caches: Sequence[Any]) -> tuple[Any, Any]:
        """Return the draft tokens after `newest` [sequences] and their probabilities, both
        [sequences, longest].

        `rows` [sequences, 1, width] are the model's rows before it.
        """
        weights = self._weights
        n_masks = self._n_rows - 1
        masks = mx.full((int(newest.shape[0]), n_masks), weights.config.mask_token_id, newest.dtype)
        context = self._context(rows)
        x = weights._embed_input_tokens(mx.concatenate([newest[:, None], masks], axis=1))
        x = x.astype(context.dtype)
        for layer, cache in zip(weights.layers, caches, strict=True):
            x = layer(x, context, weights.rope, cache)
        hidden = weights.norm(x)[:, self._begin :]
        logits = weights._logits(hidden)
        if self._design in DSPARK_DESIGNS:
            return self._after_markov(hidden, logits, newest)
        if self._design == "dflash2":
            selector = weights.candidate_selector
            sampler = _BestTokens(selector.top_k)
            tokens = selector.select(hidden, logits, newest, sampler)
            return tokens, mx.stack(sampler.shares, axis=1)
        return mx.argmax(logits, axis=-1), share_of_best(logits)

    def _after_markov(self, hidden: Any, logits: Any, newest: Any) -> tuple[Any, Any]:
        weights = self._weights
        sampler = _BestTokens()
        tokens = weights.markov_head.sample_block(logits, first_prev_tokens=newest, sampler=sampler)
        confidence = weights.confidence(hidden, newest, tokens)
        if confidence is None:
            confidence = mx.stack(sampler.shares, axis=1)
        return tokens, confidence


class BlockHeads(HeadMemory):
    """Heads that draft a block of the trained length in one pass."""

    def _guess(
        self, wanted: Sequence[tuple[SequenceId, int, int]], drafts: list[list[int]]
    ) -> None:
        seqs = [self.caches[sequence] for sequence, _, _ in wanted]
        rows = self._newest_rows(wanted)
        newest = [[token] for _, token, _ in wanted]
        groups = [range(len(seqs))]
        if not self.together(seqs, newest):
            groups = [range(i, i + 1) for i in range(len(seqs))]
        for group in groups:
            members = [seqs[i] for i in group]
            batch, order, ids = self._batch.gather(members, [newest[i] for i in group])
            batch.make_room(1)
            features = joined([rows[group[i]] for i in order])
            tokens, certainty = self._module.block(ids[:, 0], features, batch.caches)
            mx.eval(tokens, certainty)
            # The row of features stays unread, since its token is not accepted yet.
            batch.advance([0] * len(order))
            guesses = zip(np.array(tokens).tolist(), np.array(certainty).tolist(), strict=True)
            for place, (guessed, probabilities) in zip(order, guesses, strict=True):
                i = group[place]
                likely = takewhile(_is_likely, zip(guessed, probabilities, strict=True))
                drafts[i] += [token for token, _ in likely][: wanted[i][2]]


def _is_likely(guess: tuple[int, float]) -> bool:
    return guess[1] >= MIN_PROBABILITY


def dflash_module(folder: Path, drafter: DrafterConfig, target: Target) -> DflashModule:
    """Return the DFlash, DFlash2 or DSpark drafter in `folder`."""
    package = import_module(f"mlx_vlm.speculative.drafters.{_PACKAGES[drafter.design]}")

    def make(config: dict[str, Any]) -> Any:
        full_config = {**config, "num_target_layers": len(target.layers)}
        if target.family.startswith("gemma4"):
            full_config.setdefault("mask_token_id", _GEMMA4_MASK)
        return package.Model(package.ModelConfig.from_dict(full_config))

    weights = read_module(folder, make)
    settings = weights.config
    check_ids("its mask token", [settings.mask_token_id], target.vocabulary)
    for layer in weights.layers:
        attention = layer.self_attn
        window = 0
        if attention.is_sliding:
            window = settings.sliding_window - 1
        if settings.draft_window_size:
            window = settings.draft_window_size
        if window and attention.is_causal:
            raise ValueError("it has a sliding window in blocks that attend to earlier tokens only")
        layer.self_attn = _BlockAttention(attention, window, causal=attention.is_causal)
    return DflashModule(weights, drafter, target, fingerprint(folder)[:12])
