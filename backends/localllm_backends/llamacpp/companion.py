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
from itertools import islice, takewhile
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
from localllm_backends.reasons import first_reason

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
    "eagle3": frozenset(
        {
            "bailingmoe3",
            "gemma4",
            "gpt-oss",
            "mimo2",
            "nemotron_h",
            "nemotron_h_moe",
            "qwen35",
            "qwen35moe",
            "qwen3next",
        }
    ),
    "dflash": frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"}),
}
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
            for i, row in enumerate(rows[begin : begin + self._n_batch], start=self._memory.end(0)):
                self._encoder.add_row(0, i, 0, row, output=True)
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
        self._batch.add_row(
            [newest, *drafted][step], self._lines[sequence].read, sequence, rows[step], output=True
        )

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
        own = llama.llama_get_model(context)
        if int(llama.llama_model_rope_type(own)) == _MROPE:
            dimensions = 4
        else:
            dimensions = 1
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
        self._masked.clear()
        for sequence, newest, _ in wanted:
            at = self._lines[sequence].read
            tokens = [newest, *[block.mask] * (block.rows - 1)]
            self._masked.add(sequence, at + 1, tokens, 0 if block.selector_top_k else block.rows)
        # The newest row of each, which has no token behind it yet that the model has read.
        done = self._read([(sequence, 0) for sequence, _, _ in wanted])
        if not done or self._decoder.decode(self._masked.native):
            return [[] for _ in wanted]
        n = len(wanted) * block.rows
        drafts = []
        for i, (_, _, most) in enumerate(wanted):
            guesses = self._guesses(n, i * block.rows)
            sure = takewhile(lambda guess: guess[1] >= LEAST_PROBABILITY, guesses)
            drafts.append([token for token, _ in islice(sure, most)])
        return drafts

    def _guesses(self, n: int, begin: int) -> Iterator[tuple[int, float]]:
        """The best token for each place of the block from row `begin` of `n` on, and how sure that
        is."""
        block = self._block
        before = 0
        k = block.selector_top_k
        hidden: Any = self._hidden(n) if k or block.confidence else None
        for i in range(begin + block.anchor, begin + block.rows):
            if k:
                scores = hidden[i][k + before * k : k + (before + 1) * k].astype(np.float64)
                before = int(scores.argmax())
                yield int(hidden[i][before]), float(1.0 / np.exp(scores - scores[before]).sum())
            else:
                token, probability = best(self._decoder.logits(n)[i])
                yield token, float(hidden[i, 0]) if block.confidence else probability


class _BlockLayout:
    """How a block of DFlash's is laid out: `rows` tokens, the newest and masks behind it, guesses
    from row `anchor` on."""

    def __init__(self, header: NativeHeader) -> None:
        self.rows = header.number("dflash.block_size") or 16
        self.mask = header.number("tokenizer.ggml.mask_token_id", -1)
        self.causal = bool(header.number("dflash.attention.causal"))
        markov = header.has_tensor("markov_w1.weight")
        # DSpark's first guess is at the newest token's own place, unless it was trained otherwise.
        if markov and header.number("dflash.sample_from_anchor", 1):
            self.anchor = 0
        else:
            self.anchor = 1
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
    unfit = _assistant_unfit if kind == _ASSISTANT else _reader_unfit
    reason = unfit(header, main, kind, architecture)
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
    """Why a reader of features can't draft for the model."""
    width = main.number(f"{architecture}.embedding_length")
    own = header.number(f"{kind}.embedding_length")
    if kind == "eagle3":
        made_for = header.number("eagle3.target_hidden_size")
    else:
        made_for = own
    has_embeddings = header.has_tensor("token_embd.weight") and header.has_tensor("output.weight")
    layers = header.numbers(f"{kind}.target_layers")
    block = _BlockLayout(header)
    n_layers = main.number(f"{architecture}.block_count") - main.number(
        f"{architecture}.nextn_predict_layers"
    )
    return first_reason(
        [
            (
                architecture not in _GIVE_FEATURES,
                f"llama.cpp does not give what the layers of {architecture!r} models make",
            ),
            (
                header.number("dflash.hyper_connection.count"),
                "DSpark drafters with DeepSeek-V4's own layers were never tried here",
            ),
            (
                made_for != width,
                f"it was trained for a model whose layers are {made_for:,} wide, and this one's "
                f"are {width:,}",
            ),
            (
                own != width and not has_embeddings,
                f"it is {own:,} wide and would share the embeddings of a model that is {width:,} "
                "wide",
            ),
            (
                not layers or min(layers) < 0 or max(layers) > n_layers,
                f"it reads the layers {', '.join(map(str, layers)) or 'none'}, and this model has "
                f"{n_layers}",
            ),
            (
                n_layers in layers and architecture not in _GIVE_LAST[kind],
                "it reads behind the last layer, which llama.cpp does not give of "
                f"{architecture!r} models",
            ),
            (
                kind == "dflash" and (not 2 <= block.rows <= _LONGEST_BLOCK or block.mask < 0),
                f"its block of {block.rows} tokens, or its mask token, can't be used",
            ),
        ]
    )


def _assistant_unfit(header: NativeHeader, main: NativeHeader, kind: str, architecture: str) -> str:
    """Why an assistant can't read what the last two layers of this model keep: llama.cpp does not
    look, and would read beside it."""
    width = main.number("gemma4.embedding_length")
    wanted = header.number(f"{kind}.embedding_length_out")
    last = main.number("gemma4.block_count") - 1
    kept = _kept_by_layer(main, "gemma4")
    read = _kept_by_layer(header, kind)
    fits = len(kept) > last > 0 and read and all(one == kept[last - one[0]] for one in read)
    windows = (
        main.number("gemma4.attention.sliding_window"),
        header.number(f"{kind}.attention.sliding_window"),
    )
    return first_reason(
        [
            (
                architecture != "gemma4",
                f"it reads the KV of a Gemma 4 model, and this is a {architecture!r} model",
            ),
            (
                width != wanted,
                f"it was made for a model {wanted:,} wide, and this one is {width:,} wide",
            ),
            (
                not fits or windows[0] != windows[1],
                "its layers read keys of other sizes, or another window, than this model's last "
                "two layers have",
            ),
        ]
    )


def _kept_by_layer(header: NativeHeader, architecture: str) -> list[tuple[int, int, int]]:
    """Of each layer whether it sees a window alone, its heads of keys and their width."""
    windows, heads = (
        header.numbers(f"{architecture}.attention.{k}")
        for k in ("sliding_window_pattern", "head_count_kv")
    )
    widths = [header.number(f"{architecture}.attention.key_length{end}") for end in ("", "_swa")]
    if len(heads) != len(windows):
        heads = heads * len(windows)
    return [(window, n, widths[window]) for window, n in zip(windows, heads, strict=False)]


def _check_vocabulary(llama: Any, path: Path, model: Any, drafter: Any) -> None:
    own = llama.llama_model_get_vocab(model)
    its = llama.llama_model_get_vocab(drafter)
    n = int(llama.llama_vocab_n_tokens(own))
    m = int(llama.llama_vocab_n_tokens(its))
    if n != m:
        raise _refused(path, f"its vocabulary has {m:,} tokens and the model's {n:,}")
    text = llama.llama_vocab_get_text
    for i in range(n):
        if text(own, i) != text(its, i):
            raise _refused(
                path, f"its token {i} is {text(its, i)!r} and the model's {text(own, i)!r}"
            )
