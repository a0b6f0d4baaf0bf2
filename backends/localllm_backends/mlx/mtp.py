"""A model's own draft heads (MTP) on MLX: the layer after the model's last one, which mlx-lm does
not load.

From a token and the model's hidden state at the position before it, a head predicts the token after
it. The hidden state is the output of the model's last norm, which is also the input of its output
matrix. The head continues from its own such output (github.com/ggml-org/llama.cpp/pull/24025,
github.com/vllm-project/vllm/pull/47448; vLLM's qwen3_next_mtp and mimo_mtp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from localllm_backends.contract import LoadError, SequenceId
from localllm_backends.draft_head_state import (
    CANDIDATES,
    LEAST_PROBABILITY,
    LONGEST_DRAFT,
    FollowingHeads,
)
from localllm_backends.mlx.attention import KvFormat
from localllm_backends.mlx.files import weight_files
from localllm_backends.mlx.kv_export import KvExport
from localllm_backends.mlx.results import HiddenRow
from localllm_backends.mlx.sequence_cache import Layout, SequenceBatch, SequenceCache, arrays_of
from localllm_backends.mlx.shapes import Shapes
from localllm_backends.mlx.stepping import WHOLE_TOKENS, Stepper

# Names of a head's weights in checkpoints, and our names. With ours, mlx-lm's own rules for a layer
# and for norms apply.
_QWEN = {
    "mtp.layers.0.": "model.layers.0.",
    "mtp.pre_fc_norm_embedding.": "embed_norm.input_layernorm.",
    "mtp.pre_fc_norm_hidden.": "hidden_norm.input_layernorm.",
    "mtp.norm.": "model.norm.",
    "mtp.fc.": "join.",
}
_MIMO = {
    "model.mtp_layers.0.token_layernorm.": "embed_norm.input_layernorm.",
    "model.mtp_layers.0.hidden_layernorm.": "hidden_norm.input_layernorm.",
    "model.mtp_layers.0.final_layernorm.": "model.norm.",
    "model.mtp_layers.0.input_proj.": "join.",
    "model.mtp_layers.0.": "model.layers.0.",
}
_FAMILIES = {"qwen3_next": _QWEN, "qwen3_5": _QWEN, "qwen3_5_moe": _QWEN, "mimo": _MIMO}
# Families whose joining matrix takes the hidden state before the embedding.
_HIDDEN_FIRST = {"mimo"}
# Settings for a model with one layer of the same kind as the head's.
_ONE_LAYER = {
    "num_hidden_layers": 1,
    "full_attention_interval": 1,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


class MtpModule(nn.Module):  # type: ignore[misc]
    """A head's weights, loaded with mlx-lm's code.

    A model of the same kind with a single layer defines how they are stored.
    """

    def __init__(self, config: dict[str, Any], model: Any) -> None:
        super().__init__()
        text = {**config.get("text_config", config), **_ONE_LAYER}
        one_layer = text
        if "text_config" in config:
            one_layer = {**config, "text_config": text}
        kin = type(model)(type(model.args).from_dict(one_layer))
        language_model = getattr(model, "language_model", model)

        def of_head() -> Any:
            return language_model

        # Not a member, because its weights are not part of the head's.
        self._language_model = of_head
        self._kind = str(config["model_type"])
        self._sanitize = getattr(kin, "sanitize", dict)
        width = int(text["hidden_size"])
        eps = text["rms_norm_eps"]
        self.width = width
        self.model = {"layers": kin.model.layers[:1], "norm": kin.model.norm}
        self.embed_norm = {"input_layernorm": nn.RMSNorm(width, eps)}
        self.hidden_norm = {"input_layernorm": nn.RMSNorm(width, eps)}
        self.join = nn.Linear(2 * width, width, bias=False)

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Select the head's weights from a checkpoint, converted by mlx-lm's rules for such a
        layer."""
        # mlx-lm's rule for norms depends on how convolutions are stored.
        found = {name: value for name, value in weights.items() if "conv1d" in name}
        for name, value in weights.items():
            for theirs, ours in _FAMILIES[self._kind].items():
                if theirs in name:
                    found[ours + name.partition(theirs)[2]] = value
                    break
        own = {}
        for name, value in self._sanitize(found).items():
            if "conv1d" not in name:
                own[name.removeprefix("language_model.")] = value
        return own

    def tap(self, hand_on: Callable[[Any], None]) -> None:
        """Pass the model's hidden rows of every call to `hand_on`."""
        trunk = self._language_model().model
        norm = trunk.norm

        def tapped(x: Any) -> Any:
            made = norm(x)
            hand_on(made)
            return made

        trunk.norm = tapped

    def __call__(self, tokens: Any, rows: Any, cache: Any) -> Any:
        """Return the hidden rows after `tokens` [sequences, n], given the model's hidden rows
        before them."""
        known = self._language_model().model.embed_tokens(tokens)
        parts = [
            self.embed_norm["input_layernorm"](known),
            self.hidden_norm["input_layernorm"](rows.astype(known.dtype)),
        ]
        if self._kind in _HIDDEN_FIRST:
            parts.reverse()
        x = self.join(mx.concatenate(parts, axis=-1))
        [layer] = self.model["layers"]
        out = layer(x, create_attention_mask(x, cache), cache)
        return self.model["norm"](out)

    def logits(self, hidden: Any) -> Any:
        """Return logits computed with the model's own output matrix."""
        model = self._language_model()
        if "lm_head" in model:
            return model.lm_head(hidden)
        return model.model.embed_tokens.as_linear(hidden)


def read_heads(folder: Path, model: Any, config: dict[str, Any]) -> MtpModule:
    """Return the draft head in the checkpoint of `model`, without reading its weights.

    Raises LoadError if there is no head that runs here.
    """
    kind = str(config.get("model_type", ""))
    if kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise LoadError(
            f"draft heads of {kind!r} models can't run on MLX here; those of {known} can"
        )
    first = next(theirs for theirs, ours in _FAMILIES[kind].items() if ours == "model.layers.0.")
    stored: list[str] = []
    for file in weight_files(folder):
        weights: Any = mx.load(str(file))
        stored += weights
    if not any(first in name for name in stored):
        raise LoadError(
            f"{folder.name!r} has no draft heads in its weights: "
            "mlx-lm leaves them out of what it converts",
            f"use a checkpoint that has them (weights named {first}*), "
            "as its makers' own files do, or --draft auto",
        )
    if any(first.replace("0", "1") in name for name in stored):
        raise LoadError(f"{folder.name!r} has several draft heads, and one is run on MLX here")

    class Arguments:
        from_dict: Any = staticmethod(dict)

    def make_head(own_config: dict[str, Any]) -> MtpModule:
        return MtpModule(own_config, model)

    def classes(config: Any) -> tuple[Any, Any]:
        return make_head, Arguments

    try:
        head, _ = load_model(folder, lazy=True, get_model_classes=classes)
    except Exception as e:
        raise LoadError(
            f"the draft head in {folder.name!r} can't be read: {str(e).strip()[:300]}"
        ) from e
    return head  # type: ignore[no-any-return]


class MlxHeads(FollowingHeads[HiddenRow]):
    """A head that drafts one token after another, each from the hidden row of the previous one.

    All sequences draft in lockstep.
    """

    kind = "mtp"
    longest = LONGEST_DRAFT

    def __init__(self, module: MtpModule, stepper: Stepper, identity: str, *, n_batch: int) -> None:
        super().__init__(n_batch)
        module.tap(stepper.keep_hidden)
        held = shapes(module)
        self._module = module
        self._layout = held.layout
        # The head's KV of each sequence.
        self.caches: dict[SequenceId, SequenceCache] = {}
        self._batch = SequenceBatch(self._layout)
        self._zeros = mx.zeros((1, 1, module.width))
        self._exports = KvExport(f"{identity} heads", held, stepper, apart=False)

    def open(self, sequence: SequenceId) -> None:
        super().open(sequence)
        self.caches[sequence] = SequenceCache(sequence, self._layout)

    def close(self, sequence: SequenceId) -> None:
        super().close(sequence)
        del self.caches[sequence]

    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        sequences = [sequence for sequence, _, _ in wanted]
        self.catch_up(sequences)
        try:
            self._guess(wanted, drafts)
        except Exception:
            for sequence in sequences:
                self._restart(sequence, self._lines[sequence].read)
        self.forget_drafts(sequences)
        return drafts

    def _guess(
        self, wanted: Sequence[tuple[SequenceId, int, int]], drafts: list[list[int]]
    ) -> None:
        """Append likely tokens to `drafts` until all of them have stopped."""
        caches = [self.caches[sequence] for sequence, _, _ in wanted]
        rows = [_stacked([self._lines[sequence].rows[-1]]) for sequence, _, _ in wanted]
        tokens = [[newest] for _, newest, _ in wanted]
        limits = [min(most, self.longest) for _, _, most in wanted]
        for step in range(max(limits, default=0)):
            hidden = self._call(caches, tokens, rows)
            rows = [known[0] for known in hidden]
            guesses = self._best(hidden)
            # Sequences that have stopped stay in the batch, because leaving it costs more.
            tokens = [[token] for token, _ in guesses]
            for draft, limit, (token, probability) in zip(drafts, limits, guesses, strict=True):
                if step == len(draft) < limit and probability >= LEAST_PROBABILITY:
                    draft.append(token)
            if all(len(draft) <= step for draft in drafts):
                return

    def _best(self, hidden: list[Any]) -> list[tuple[int, float]]:
        """Return for each row the best token and its probability among the ten best."""
        logits = self._module.logits(mx.concatenate(hidden))[:, -1].astype(mx.float32)
        top = mx.topk(logits, min(CANDIDATES, int(logits.shape[-1])), axis=-1)
        behind = top - top.max(axis=-1, keepdims=True)
        share = 1 / mx.exp(behind).sum(axis=-1)
        best = mx.argmax(logits, axis=-1)
        mx.eval(best, share)
        tokens = np.array(best).tolist()
        return list(zip(tokens, np.array(share).tolist(), strict=True))

    # --- the heads' memory ------------------------------------------------------------------------

    def _call(
        self, lines: Sequence[SequenceCache], tokens: Sequence[list[int]], rows: Sequence[Any]
    ) -> list[Any]:
        """Run the head over these tokens of each sequence; returns hidden rows [1, n, width], not
        computed yet.

        All sequences run together if each has a past and few new tokens.
        """
        fit = [
            line.start_of(0) < line.length and len(new) <= WHOLE_TOKENS
            for line, new in zip(lines, tokens, strict=True)
        ]
        if len(lines) > 1 and not all(fit):
            apart: list[Any] = []
            for line, new, known in zip(lines, tokens, rows, strict=True):
                apart += self._call([line], [new], [known])
            return apart
        batch, order, ids = self._batch.gather(lines, tokens)
        longest = int(ids.shape[1])
        padded = []
        for i in order:
            n_missing = longest - len(tokens[i])
            padded.append(mx.pad(rows[i], [(0, n_missing), (0, 0)]))
        batch.make_room(longest)
        hidden = self._module(ids, mx.stack(padded), batch.caches[0])
        batch.advance([len(tokens[i]) for i in order])
        for line, new in zip(lines, tokens, strict=True):
            line.length += len(new)
        own_rows = []
        for i, new in enumerate(tokens):
            row = order.index(i)
            own_rows.append(hidden[row : row + 1, : len(new)])
        return own_rows

    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        tokens: dict[SequenceId, list[int]] = {}
        rows: dict[SequenceId, list[HiddenRow]] = {}
        for sequence, i in places:
            line = self._lines[sequence]
            tokens.setdefault(sequence, []).append(line.unread[i])
            rows.setdefault(sequence, []).append(line.rows[i])
        lines = [self.caches[sequence] for sequence in tokens]
        try:
            stacked = [_stacked(known) for known in rows.values()]
            self._call(lines, list(tokens.values()), stacked)
            mx.async_eval([arrays_of(line.leaves) for line in lines])
        except Exception:
            return False
        return True

    def _cut(self, sequence: SequenceId, n_tokens: int) -> None:
        line = self.caches[sequence]
        if n_tokens <= line.start_of(0):
            self._restart(sequence, n_tokens)
        else:
            line.length = n_tokens
            line.place(n_tokens)

    def _restart(self, sequence: SequenceId, n_tokens: int) -> None:
        self.caches[sequence].clear(n_tokens)

    def _copy(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        line = self.caches[source]
        if n_tokens <= line.start_of(0):
            self._restart(target, n_tokens)
        else:
            line.fork_into(self.caches[target], n_tokens)

    def _zero_row(self) -> HiddenRow:
        return self._zeros, 0, 0

    def _detached(self, row: HiddenRow) -> HiddenRow:
        own = mx.contiguous(_stacked([row])[None])
        mx.async_eval(own)
        return own, 0, 0

    # --- export and import ------------------------------------------------------------------------

    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """Return the heads' KV of tokens [start, stop); empty if they have not read all of them."""
        self.catch_up([sequence])
        line = self.caches[sequence]
        if line.start_of(0) > start:
            return b""
        return self._exports.export_range(line, start, stop)

    def import_range(self, sequence: SequenceId, data: memoryview, start: int, stop: int) -> None:
        """Append tokens [start, stop) from the data of `export_range`."""
        self.catch_up([sequence])
        with self._importing(sequence, stop):
            self._exports.import_range(self.caches[sequence], data, start, stop)


def shapes(module: MtpModule) -> Shapes:
    """Return the shapes of a head's memory, without computing: keys and values of every token."""
    rows = mx.zeros((1, 2, module.width))

    def call(ids: Any, cache: Any) -> Any:
        return module(ids, rows, cache[0])

    return Shapes.of(call, Layout([KVCache()], KvFormat(), 0))


def _stacked(rows: Sequence[HiddenRow]) -> Any:
    """Return these rows as one array [n, width]. Adjacent rows are taken as one slice."""
    parts: list[Any] = []
    array, line, begin = rows[0]
    end = begin
    for its_array, its_line, at in rows:
        if its_array is not array or (its_line, at) != (line, end):
            parts.append(array[line, begin:end])
            array = its_array
            line = its_line
            begin = at
        end = at + 1
    last = array[line, begin:end]
    if not parts:
        return last
    return mx.concatenate([part.astype(last.dtype) for part in (*parts, last)])
