"""Drafters for one model in a separate file, on llama.cpp: EAGLE-3, DFlash, DSpark.

They read the model's features: layer outputs for each token, taken during the model's own step.
They share the model's vocabulary. If their file lacks embeddings and an output matrix, they share
those too. The order of operations follows llama.cpp's own drivers: common/speculative.cpp,
common_speculative_impl_draft_eagle3 and common_speculative_impl_draft_dflash. The drivers read a
row at its own position. We read it at the position of the next token, like a model's own heads.
Rotary attention depends on distances only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from localllm_backends.contract import LoadError, LoadSpec, SequenceId
from localllm_backends.draft_head_state import MIN_PROBABILITY, HeadState
from localllm_backends.llamacpp.batch import Batch, Rows
from localllm_backends.llamacpp.context import new_context
from localllm_backends.llamacpp.gguf_header import NativeHeader, parts
from localllm_backends.llamacpp.heads import DraftHeads, best
from localllm_backends.llamacpp.mtp import MtpHeads
from localllm_backends.llamacpp.native import Buffers
from localllm_backends.llamacpp.weights import check_file, load_model

_ASSISTANT = "gemma4-assistant"
KINDS = ("eagle3", "dflash", _ASSISTANT)
# Architectures whose layer inputs llama.cpp returns (src/models: t_layer_inp). For other
# architectures it aborts the process.
_GIVE_FEATURES = frozenset({
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan_vl", "lfm2", "llama", "mimo2",
    "minimax-01", "minimax-m2",
    "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe",
    "qwen3moe", "qwen3next",
})  # fmt: skip
# Architectures that also return the output of their last layer. EAGLE-3 reads it as a hidden row
# (t_h_nextn), DFlash as the input of one more layer.
_GIVE_LAST = {
    "eagle3": frozenset({
        "bailingmoe3", "gemma4", "gpt-oss", "mimo2", "nemotron_h", "nemotron_h_moe", "qwen35",
        "qwen35moe", "qwen3next",
    }),
    "dflash": frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"}),
}  # fmt: skip
_LONGEST_BLOCK = 64
# Tokens per llama.cpp batch. Each row reserves space for its logits, even if they are not read.
_BATCH = 128


class Eagle3Heads(MtpHeads):
    """EAGLE-3: one layer that drafts from its own hidden row.

    The first hidden row is made by an encoder from the features of three layers of the model. The
    drafter's vocabulary may be a part of the model's; llama.cpp maps it (d2t).
    """

    kind = "eagle3"
    first = 1

    def __init__(self, llama: Any, target: Any, context: Any, layers: Sequence[int | None]) -> None:
        super().__init__(llama, target, context, layers)
        self._encoder = Batch(llama, self._n_batch, width=self._width, tokens=False)

    def _inputs(self, rows: Sequence[Rows]) -> Sequence[Rows]:
        fused: list[Rows] = []
        for begin in range(0, len(rows), self._n_batch):
            self._encoder.clear()
            # Encoders use no positions, but llama.cpp requires them to continue the sequence.
            position = self._memory.end(0)
            for row in rows[begin : begin + self._n_batch]:
                self._encoder.add_row(0, position, 0, row, output=True)
                position += 1
            if int(self._llama.llama_encode(self._context, self._encoder.native)):
                return [np.zeros(self._n_hidden, dtype=np.float32)] * len(rows)
            fused.extend(self._hidden(int(self._encoder.native.n_tokens)).copy())
        return fused


class AssistantHeads(MtpHeads):
    """Gemma 4's assistants: a few layers that attend to the KV of the model's last two layers.

    They have no KV of their own. All draft tokens use the position of the first one, as in
    training.
    """

    kind = "assistant"

    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        return True

    def _add_draft_rows(
        self, want: tuple[SequenceId, int, int], drafted: list[int], rows: list[Rows], step: int
    ) -> None:
        sequence, newest, _ = want
        token = [newest, *drafted][step]
        position = self._states[sequence].read
        self._batch.add_row(token, position, sequence, rows[step], output=True)

    def export_range(self, sequence: SequenceId, start: int, stop: int, via: int) -> bytes:
        return b""

    def import_range(
        self, sequence: SequenceId, data: memoryview, start: int, stop: int, via: int
    ) -> None:
        self._states[sequence] = HeadState(stop, [self._zero_row()])


class DflashHeads(DraftHeads):
    """DFlash: a few layers that fill in a block of masked tokens in one pass.

    Their KV is computed from the features of tokens that the model has read. DSpark's Markov head
    is part of that pass; its confidences determine the length of the draft. DFlash2 returns a few
    candidates for each place, with scores for each pair of neighbours (its selector).
    """

    kind = "dflash"
    first = 1

    def __init__(
        self, llama: Any, target: Any, context: Any, layers: Sequence[int], block: _BlockLayout
    ) -> None:
        super().__init__(llama, target, context, layers)
        self._block = block
        self.longest = block.rows - block.anchor
        dimensions = 1
        if (
            int(llama.llama_model_rope_type(llama.llama_get_model(context)))
            == llama.LLAMA_ROPE_TYPE_MROPE
        ):
            dimensions = 4
        self._inject = Batch(
            llama, self._n_batch, width=self._width, tokens=False, dimensions=dimensions
        )
        self._masked = Batch(llama, self._n_batch)
        # A selector's candidates are not rows of the output.
        llama.llama_set_embeddings_nextn(context, True, not block.selector_top_k)
        llama.llama_set_causal_attn(context, block.causal)

    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        self._inject.clear()
        for sequence, i in places:
            state = self._states[sequence]
            self._inject.add_row(0, state.read + i, sequence, state.rows[i], output=False)
        self._inject.place_text()
        return self._decoder.decode(self._inject.native) == 0

    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """Draft full blocks of the trained length, since masked tokens attend to each other."""
        drafts: list[list[int]] = []
        self.catch_up([sequence for sequence, _, _ in wanted])
        at_once = self._n_batch // self._block.rows
        for begin in range(0, len(wanted), at_once):
            drafts += self._blocks(wanted[begin : begin + at_once])
        self.forget_drafts([sequence for sequence, _, _ in wanted])
        return drafts

    def _blocks(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        block = self._block
        n_outputs = 0 if block.selector_top_k else block.rows
        masks = [block.mask] * (block.rows - 1)
        self._masked.clear()
        for sequence, newest, _ in wanted:
            at = self._states[sequence].read
            self._masked.add(sequence, at + 1, [newest, *masks], n_outputs)
        # The newest row of each sequence. The model has not read the token after it yet.
        done = self._read([(sequence, 0) for sequence, _, _ in wanted])
        if not done or self._decoder.decode(self._masked.native):
            return [[] for _ in wanted]
        n = len(wanted) * block.rows
        drafts = []
        for i, (_, _, most) in enumerate(wanted):
            draft: list[int] = []
            for token, probability in islice(self._guesses(n, i * block.rows), most):
                if probability < MIN_PROBABILITY:
                    break
                draft.append(token)
            drafts.append(draft)
        return drafts

    def _guesses(self, n: int, begin: int) -> Iterator[tuple[int, float]]:
        """Yield the best token for each place of a block, and its probability.

        The block starts at row `begin` of `n`.
        """
        block = self._block
        rows = range(begin + block.anchor, begin + block.rows)
        if block.selector_top_k:
            yield from self._selected(self._hidden(n), rows)
            return
        for i in rows:
            token, probability = best(self._decoder.logits(n)[i])
            if block.confidence:
                probability = float(self._hidden(n)[i, 0])
            yield token, probability

    def _selected(self, hidden: Rows, rows: range) -> Iterator[tuple[int, float]]:
        """The same with a selector.

        Each row holds k candidates. Then, for each of the k candidates of the row before, it holds
        the scores of all k.
        """
        k = self._block.selector_top_k
        before = 0
        for i in rows:
            begin = k + before * k
            scores = hidden[i][begin : begin + k].astype(np.float64)
            before = int(scores.argmax())
            probability = 1.0 / np.exp(scores - scores[before]).sum()
            yield int(hidden[i][before]), float(probability)


class _BlockLayout:
    """Layout of a DFlash block.

    It has `rows` tokens: the newest token, then masks. Draft tokens start at row `anchor`.
    """

    def __init__(self, header: NativeHeader) -> None:
        self.rows = header.number("dflash.block_size") or 16
        self.mask = header.number("tokenizer.ggml.mask_token_id", -1)
        self.causal = bool(header.number("dflash.attention.causal"))
        markov = header.has_tensor("markov_w1.weight")
        # DSpark's first draft token is at the place of the newest token, unless trained otherwise.
        self.anchor = 1
        if markov and header.number("dflash.sample_from_anchor", 1):
            self.anchor = 0
        self.confidence = markov and header.has_tensor("conf_proj.weight")
        self.selector_top_k = header.number("dflash.selector_top_k")


# --- opening a drafter ----------------------------------------------------------------------------


def open_drafter(
    llama: Any, model: Any, target: Any, spec: LoadSpec, n_seq_max: int
) -> tuple[DraftHeads, Buffers]:
    """Open the drafter `spec.drafter` for `target`, a context of `model`.

    Returns the drafter and the buffers of its weights. Raises LoadError if it does not fit this
    model or can't run here.
    """
    path = Path(spec.drafter)
    check_file(path)
    missing = llama.missing("drafters")
    if missing:
        raise _refused(path, f"this llama.cpp can't use drafters: {missing}")
    header = NativeHeader(path)
    main = NativeHeader(parts(Path(spec.path))[0])
    kind = header.text("general.architecture")
    architecture = main.text("general.architecture")
    if kind not in KINDS:
        raise _refused(
            path,
            f"the file is a {kind or 'nameless'} model, not a drafter of the "
            f"kinds {' or '.join(KINDS)}",
        )
    if kind == _ASSISTANT:
        reason = _assistant_unfit(header, main, architecture)
    else:
        reason = _reader_unfit(header, main, kind, architecture)
    if reason:
        raise _refused(path, reason)
    layers = header.numbers(f"{kind}.target_layers")
    block = _BlockLayout(header)
    drafter, buffers = load_model(path, spec, None, drafter=True)
    with ExitStack() as freed:
        freed.callback(llama.llama_model_free, drafter)
        _check_vocabulary(llama, path, model, drafter)
        context = new_context(
            drafter,
            spec,
            n_seq_max=n_seq_max,
            target=target,
            n_batch=max(_BATCH, n_seq_max),
            draft_cells=block.rows if kind == "dflash" else 0,
        )
        freed.pop_all()
    if kind == _ASSISTANT:
        return AssistantHeads(llama, target, context), buffers
    if kind == "dflash":
        return DflashHeads(llama, target, context, layers, block), buffers
    # EAGLE-3 reads the last layer's output in the same way as MTP.
    last = int(llama.llama_model_n_layer(model))
    rows = [None if layer == last else layer for layer in layers]
    return Eagle3Heads(llama, target, context, rows), buffers


def _refused(path: Path, why: str) -> LoadError:
    return LoadError(
        f"{path.name!r} can't draft for this model: {why}",
        "use the drafter that was published for this model, or `--draft auto`",
    )


def _reader_unfit(header: NativeHeader, main: NativeHeader, kind: str, architecture: str) -> str:
    """Return why a drafter that reads features can't draft for the model; "" if it can."""
    if architecture not in _GIVE_FEATURES:
        return f"llama.cpp does not return the hidden states of {architecture!r} models"
    if header.number("dflash.hyper_connection.count"):
        return (
            "DSpark drafters with DeepSeek-V4's layers are not supported, because "
            "we have not tested them"
        )
    width = main.number(f"{architecture}.embedding_length")
    own = header.number(f"{kind}.embedding_length")
    made_for = own
    if kind == "eagle3":
        made_for = header.number("eagle3.target_hidden_size")
    if made_for != width:
        return (
            f"it was trained for a model with hidden size {made_for:,}, and "
            f"this model has {width:,}"
        )
    has_embeddings = header.has_tensor("token_embd.weight") and header.has_tensor("output.weight")
    if own != width and not has_embeddings:
        return (
            f"its hidden size is {own:,}, but it shares the embeddings of the model, whose "
            f"hidden size is {width:,}"
        )
    reason = _layers_unfit(header, main, kind, architecture)
    if reason or kind != "dflash":
        return reason
    block = _BlockLayout(header)
    if not 2 <= block.rows <= _LONGEST_BLOCK or block.mask < 0:
        return f"its block of {block.rows} tokens or its mask token is not supported"
    return ""


def _layers_unfit(header: NativeHeader, main: NativeHeader, kind: str, architecture: str) -> str:
    """Return why the drafter can't read the model's layers; "" if it can."""
    layers = header.numbers(f"{kind}.target_layers")
    n_heads = main.number(f"{architecture}.nextn_predict_layers")
    n_layers = main.number(f"{architecture}.block_count") - n_heads
    if not layers:
        return f"it names no layers to read, and this model has {n_layers}"
    if min(layers) < 0 or max(layers) > n_layers:
        listed = ", ".join(str(layer) for layer in layers)
        return f"it reads the layers {listed}, and this model has {n_layers}"
    if n_layers in layers and architecture not in _GIVE_LAST[kind]:
        return (
            "it reads the output of the last layer, which llama.cpp does not return for "
            f"{architecture!r} models"
        )
    return ""


def _assistant_unfit(header: NativeHeader, main: NativeHeader, architecture: str) -> str:
    """Return why an assistant can't read the KV of the model's last two layers; "" if it can.

    llama.cpp does not check this, and would read outside the buffers.
    """
    if architecture != "gemma4":
        return f"it reads the KV of a Gemma 4 model, but this is a {architecture!r} model"
    width = main.number("gemma4.embedding_length")
    wanted = header.number(f"{_ASSISTANT}.embedding_length_out")
    if width != wanted:
        return f"it was made for a model with hidden size {wanted:,}, and this model has {width:,}"
    window = main.number("gemma4.attention.sliding_window")
    read_window = header.number(f"{_ASSISTANT}.attention.sliding_window")
    if window != read_window or not _reads_last_layers(header, main):
        return "its key sizes or its window differ from those of this model's last two layers"
    return ""


def _reads_last_layers(header: NativeHeader, main: NativeHeader) -> bool:
    """Return whether an assistant's layers expect the KV sizes of the model's last two layers."""
    last = main.number("gemma4.block_count") - 1
    kept = _kept_by_layer(main, "gemma4")
    read = _kept_by_layer(header, _ASSISTANT)
    if not len(kept) > last > 0 or not read:
        return False
    # Layers with a sliding window read the model's last layer but one.
    return all(layer == kept[last - layer[0]] for layer in read)


def _kept_by_layer(header: NativeHeader, architecture: str) -> list[tuple[int, int, int]]:
    """Return for each layer: has it a sliding window, its number of KV heads, and their width."""
    windows = header.numbers(f"{architecture}.attention.sliding_window_pattern")
    heads = header.numbers(f"{architecture}.attention.head_count_kv")
    full_width = header.number(f"{architecture}.attention.key_length")
    window_width = header.number(f"{architecture}.attention.key_length_swa")
    if len(heads) != len(windows):
        heads = heads * len(windows)
    kept = []
    for window, n_heads in zip(windows, heads, strict=False):
        kept.append((window, n_heads, window_width if window else full_width))
    return kept


def _check_vocabulary(llama: Any, path: Path, model: Any, drafter: Any) -> None:
    own = llama.llama_model_get_vocab(model)
    its = llama.llama_model_get_vocab(drafter)
    n = int(llama.llama_vocab_n_tokens(own))
    m = int(llama.llama_vocab_n_tokens(its))
    if n != m:
        raise _refused(
            path, f"its vocabulary has {m:,} tokens, and the model's vocabulary has {n:,}"
        )
    text = llama.llama_vocab_get_text
    for i in range(n):
        theirs = text(its, i)
        ours = text(own, i)
        if theirs != ours:
            raise _refused(
                path, f"token {i} is {theirs!r} in the drafter and {ours!r} in the model"
            )
