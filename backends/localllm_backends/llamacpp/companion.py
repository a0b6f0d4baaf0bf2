"""Drafters trained for one model and published as a file beside it, on llama.cpp: EAGLE-3, DFlash,
DSpark.

They read what the model's layers made of each token (its features, taken during the model's own
step) and share its vocabulary, and where their file has none, its embeddings and output matrix.
Order of operations after llama.cpp's own drivers: common/speculative.cpp,
common_speculative_impl_draft_eagle3 and common_speculative_impl_draft_dflash. There a row is read
at its own place and here at that of the token behind it, as heads of a model's own have it: rotary
attention sees distances only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from localllm_backends.contract import LoadError, LoadSpec, SequenceId
from localllm_backends.following import LEAST_PROBABILITY, HeadsLine
from localllm_backends.llamacpp.batch import Batch, Rows
from localllm_backends.llamacpp.context import new_context
from localllm_backends.llamacpp.gguf_header import NativeHeader, parts
from localllm_backends.llamacpp.heads import DraftHeads, best, staging_functions
from localllm_backends.llamacpp.mtp import MtpHeads
from localllm_backends.llamacpp.native import Buffers
from localllm_backends.llamacpp.weights import check_file, load_model

_ASSISTANT = "gemma4-assistant"
KINDS = ("eagle3", "dflash", _ASSISTANT)
# Architectures whose layers' inputs llama.cpp hands out (src/models: t_layer_inp); for any other it
# aborts the process.
_GIVE_FEATURES = frozenset({
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan_vl", "lfm2", "llama", "mimo2",
    "minimax-01", "minimax-m2",
    "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe",
    "qwen3moe", "qwen3next",
})  # fmt: skip
# What their last layer made, which EAGLE-3 asks for as a hidden row (t_h_nextn) and DFlash as one
# more layer's input.
_GIVE_LAST = {
    "eagle3": frozenset({
        "bailingmoe3", "gemma4", "gpt-oss", "mimo2", "nemotron_h", "nemotron_h_moe", "qwen35",
        "qwen35moe", "qwen3next",
    }),
    "dflash": frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"}),
}  # fmt: skip
_LONGEST_BLOCK = 64
# What llama.cpp reads with at once: every row costs room for its logits, asked for or not.
_BATCH = 128
_MROPE = 8  # llama.h: enum llama_rope_type


class Eagle3Heads(MtpHeads):
    """One layer that guesses on from its own hidden row, and first from the features of three of
    the model's layers, fused by an encoder. Its vocabulary may be a part of the model's: llama.cpp
    maps it back (d2t)."""

    kind = "eagle3"
    first = 1

    def __init__(self, llama: Any, target: Any, context: Any, layers: Sequence[int | None]) -> None:
        super().__init__(llama, target, context, layers)
        self._encoder = Batch(llama, self._n_batch, width=self._width, tokens=False)

    def _inputs(self, rows: Sequence[Rows]) -> Sequence[Rows]:
        fused: list[Rows] = []
        for begin in range(0, len(rows), self._n_batch):
            self._encoder.clear()
            # An encoder has no places, but llama.cpp wants them to follow what the sequence holds.
            position = self._memory.end(0)
            for row in rows[begin : begin + self._n_batch]:
                self._encoder.add_row(0, position, 0, row, output=True)
                position += 1
            if int(self._llama.llama_encode(self._context, self._encoder.native)):
                return [np.zeros(self._n_hidden, dtype=np.float32)] * len(rows)
            fused.extend(self._hidden(int(self._encoder.native.n_tokens)).copy())
        return fused


class AssistantHeads(MtpHeads):
    """Gemma 4's assistants: a few layers that attend to what the model's own last two layers keep,
    and keep nothing themselves. All they guess stands where the first guess does, as they were
    trained."""

    kind = "assistant"

    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        return True

    def _add_draft_rows(
        self, want: tuple[SequenceId, int, int], drafted: list[int], rows: list[Rows], step: int
    ) -> None:
        sequence, newest, _ = want
        token = [newest, *drafted][step]
        position = self._lines[sequence].read
        self._batch.add_row(token, position, sequence, rows[step], output=True)

    def export_range(self, sequence: SequenceId, start: int, stop: int, via: int) -> bytes:
        return b""

    def import_range(
        self, sequence: SequenceId, data: memoryview, start: int, stop: int, via: int
    ) -> None:
        self._lines[sequence] = HeadsLine(stop, [self._zero_row()])


class DflashHeads(DraftHeads):
    """A few layers that fill in a block of masked tokens in one pass, with the features of what the
    model has read as their KV. DSpark's Markov head is part of that pass; its confidences say where
    to stop. DFlash2 gives a few candidates for each place, with scores of what follows what (its
    selector)."""

    kind = "dflash"
    first = 1

    def __init__(
        self, llama: Any, target: Any, context: Any, layers: Sequence[int], block: _BlockLayout
    ) -> None:
        super().__init__(llama, target, context, layers)
        self._block = block
        self.longest = block.rows - block.anchor
        dimensions = 1
        if int(llama.llama_model_rope_type(llama.llama_get_model(context))) == _MROPE:
            dimensions = 4
        self._inject = Batch(
            llama, self._n_batch, width=self._width, tokens=False, dimensions=dimensions
        )
        self._masked = Batch(llama, self._n_batch)
        # The lattice of a selector is no row of an output.
        self._functions["set_rows"](context, True, not block.selector_top_k)
        llama.llama_set_causal_attn(context, block.causal)

    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        self._inject.clear()
        for sequence, i in places:
            line = self._lines[sequence]
            self._inject.add_row(0, line.read + i, sequence, line.rows[i], output=False)
        self._inject.place_text()
        return self._decoder.decode(self._inject.native) == 0

    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """Always whole blocks, of the length that they were trained with: masks see each other."""
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
            at = self._lines[sequence].read
            self._masked.add(sequence, at + 1, [newest, *masks], n_outputs)
        # The newest row of each, which has no token behind it yet that the model has read.
        done = self._read([(sequence, 0) for sequence, _, _ in wanted])
        if not done or self._decoder.decode(self._masked.native):
            return [[] for _ in wanted]
        n = len(wanted) * block.rows
        drafts = []
        for i, (_, _, most) in enumerate(wanted):
            draft: list[int] = []
            for token, probability in islice(self._guesses(n, i * block.rows), most):
                if probability < LEAST_PROBABILITY:
                    break
                draft.append(token)
            drafts.append(draft)
        return drafts

    def _guesses(self, n: int, begin: int) -> Iterator[tuple[int, float]]:
        """The best token for each place of the block from row `begin` of `n` on, and how sure that
        is."""
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
        """The same by the selector: each row holds k candidates, and then, for each of the k of the
        row before, the scores of all."""
        k = self._block.selector_top_k
        before = 0
        for i in rows:
            begin = k + before * k
            scores = hidden[i][begin : begin + k].astype(np.float64)
            before = int(scores.argmax())
            probability = 1.0 / np.exp(scores - scores[before]).sum()
            yield int(hidden[i][before]), float(probability)


class _BlockLayout:
    """How a block of DFlash's is laid out: `rows` tokens, the newest and masks behind it, guesses
    from row `anchor` on."""

    def __init__(self, header: NativeHeader) -> None:
        self.rows = header.number("dflash.block_size") or 16
        self.mask = header.number("tokenizer.ggml.mask_token_id", -1)
        self.causal = bool(header.number("dflash.attention.causal"))
        markov = header.has_tensor("markov_w1.weight")
        # DSpark's first guess is at the newest token's own place, unless it was trained otherwise.
        self.anchor = 1
        if markov and header.number("dflash.sample_from_anchor", 1):
            self.anchor = 0
        self.confidence = markov and header.has_tensor("conf_proj.weight")
        self.selector_top_k = header.number("dflash.selector_top_k")


# --- opening one ----------------------------------------------------------------------------------


def open_drafter(
    llama: Any, model: Any, target: Any, spec: LoadSpec, n_seq_max: int
) -> tuple[DraftHeads, Buffers]:
    """The drafter in the file `spec.drafter`, following `target`, a context of `model`, and what
    its weights lie in. LoadError where it is not one for this model, or can't run here."""
    path = Path(spec.drafter)
    check_file(path)
    if staging_functions() is None:
        raise _refused(
            path,
            "this build of llama.cpp does not export what drafting from a model's features needs",
        )
    header = NativeHeader(path)
    main = NativeHeader(parts(Path(spec.path))[0])
    kind = header.text("general.architecture")
    architecture = main.text("general.architecture")
    if kind not in KINDS:
        raise _refused(
            path, f"it is a {kind or 'nameless'} model and no drafter of {' or '.join(KINDS)}"
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
            beside=target,
            n_batch=max(_BATCH, n_seq_max),
            draft_cells=block.rows if kind == "dflash" else 0,
        )
        freed.pop_all()
    if kind == _ASSISTANT:
        return AssistantHeads(llama, target, context), buffers
    if kind == "dflash":
        return DflashHeads(llama, target, context, layers, block), buffers
    # What the last layer made EAGLE-3 has from where MTP has it.
    last = int(llama.llama_model_n_layer(model))
    rows = [None if layer == last else layer for layer in layers]
    return Eagle3Heads(llama, target, context, rows), buffers


def _refused(path: Path, why: str) -> LoadError:
    return LoadError(
        f"{path.name!r} can't draft for this model: {why}",
        "use the drafter published for this very model, or `--draft auto`",
    )


def _reader_unfit(header: NativeHeader, main: NativeHeader, kind: str, architecture: str) -> str:
    """Return why a reader of features can't draft for the model; "" if it can."""
    if architecture not in _GIVE_FEATURES:
        return f"llama.cpp does not give what the layers of {architecture!r} models make"
    if header.number("dflash.hyper_connection.count"):
        return "DSpark drafters with DeepSeek-V4's own layers were never tried here"
    width = main.number(f"{architecture}.embedding_length")
    own = header.number(f"{kind}.embedding_length")
    made_for = own
    if kind == "eagle3":
        made_for = header.number("eagle3.target_hidden_size")
    if made_for != width:
        return (
            f"it was trained for a model whose layers are {made_for:,} wide, "
            f"and this one's are {width:,}"
        )
    has_embeddings = header.has_tensor("token_embd.weight") and header.has_tensor("output.weight")
    if own != width and not has_embeddings:
        return (
            f"it is {own:,} wide and would share the embeddings of a model that is {width:,} wide"
        )
    reason = _layers_unfit(header, main, kind, architecture)
    if reason or kind != "dflash":
        return reason
    block = _BlockLayout(header)
    if not 2 <= block.rows <= _LONGEST_BLOCK or block.mask < 0:
        return f"its block of {block.rows} tokens, or its mask token, can't be used"
    return ""


def _layers_unfit(header: NativeHeader, main: NativeHeader, kind: str, architecture: str) -> str:
    """Return why the model's layers can't be read as the drafter reads them; "" if they can."""
    layers = header.numbers(f"{kind}.target_layers")
    n_heads = main.number(f"{architecture}.nextn_predict_layers")
    n_layers = main.number(f"{architecture}.block_count") - n_heads
    if not layers:
        return f"it reads the layers none, and this model has {n_layers}"
    if min(layers) < 0 or max(layers) > n_layers:
        listed = ", ".join(str(layer) for layer in layers)
        return f"it reads the layers {listed}, and this model has {n_layers}"
    if n_layers in layers and architecture not in _GIVE_LAST[kind]:
        return (
            "it reads behind the last layer, "
            f"which llama.cpp does not give of {architecture!r} models"
        )
    return ""


def _assistant_unfit(header: NativeHeader, main: NativeHeader, architecture: str) -> str:
    """Return why an assistant can't read what the last two layers of this model keep; "" if it can.
    llama.cpp does not look, and would read beside it."""
    if architecture != "gemma4":
        return f"it reads the KV of a Gemma 4 model, and this is a {architecture!r} model"
    width = main.number("gemma4.embedding_length")
    wanted = header.number(f"{_ASSISTANT}.embedding_length_out")
    if width != wanted:
        return f"it was made for a model {wanted:,} wide, and this one is {width:,} wide"
    window = main.number("gemma4.attention.sliding_window")
    read_window = header.number(f"{_ASSISTANT}.attention.sliding_window")
    if window != read_window or not _reads_last_layers(header, main):
        return (
            "its layers read keys of other sizes, or another window, "
            "than this model's last two layers have"
        )
    return ""


def _reads_last_layers(header: NativeHeader, main: NativeHeader) -> bool:
    """Return whether an assistant's layers read KV of the sizes that the model's last two keep."""
    last = main.number("gemma4.block_count") - 1
    kept = _kept_by_layer(main, "gemma4")
    read = _kept_by_layer(header, _ASSISTANT)
    if not len(kept) > last > 0 or not read:
        return False
    # Layers with a window read the one before the last.
    return all(layer == kept[last - layer[0]] for layer in read)


def _kept_by_layer(header: NativeHeader, architecture: str) -> list[tuple[int, int, int]]:
    """Of each layer whether it sees a window alone, its heads of keys and their width."""
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
        raise _refused(path, f"its vocabulary has {m:,} tokens and the model's {n:,}")
    text = llama.llama_vocab_get_text
    for i in range(n):
        theirs = text(its, i)
        ours = text(own, i)
        if theirs != ours:
            raise _refused(path, f"its token {i} is {theirs!r} and the model's {ours!r}")
