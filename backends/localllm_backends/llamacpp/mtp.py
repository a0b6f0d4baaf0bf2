"""A model's own draft heads (MTP, "NextN") on llama.cpp: a second context that reads along and writes ahead.

A head guesses the token after next from a token and the hidden state the model had just before it. Its context has
its own small KV (the head's layer only), which must hold what the model's holds: the same tokens at the same places,
each with the hidden row of the token before it. What a head guesses is verified by the model like any other draft, so
a head that lost its place costs acceptance and never exactness.

Order of operations after llama.cpp's own driver: common/speculative.cpp, common_speculative_impl_draft_mtp.
"""

from __future__ import annotations

import ctypes
import glob
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import Chunk, LoadError, SequenceId
from localllm_backends.llamacpp.batch import Batch
from localllm_backends.llamacpp.kv_blocks import written

Rows = NDArray[np.float32]

# llama-ext.h's staging functions have C++ names; Itanium mangling is the same on Linux and macOS (MSVC's is not).
SYMBOLS: dict[str, tuple[str, Any, list[Any]]] = {
    "set_rows": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, [ctypes.c_bool, ctypes.c_bool]),
    "rows": ("_Z26llama_get_embeddings_nextnP13llama_context", ctypes.c_void_p, []),
    "set_head": ("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, [ctypes.c_int32]),
}
# Architectures whose heads llama.cpp runs in a context of their own (src/models: DECODER_MTP graphs), and whether it
# runs several (nextn_layer_offset); with any others it aborts the process. Heads that share the model's own KV (Gemma
# 4's assistants) are models of their own there, and not run here.
_ARCHITECTURES = {
    "bailingmoe3": False, "cohere2moe": False, "deepseek2": False, "deepseek32": False, "deepseek4": False,
    "glm-dsa": False, "glm4moe": False, "glm5-next": False, "hy_v3": True, "mimo2": True, "nemotron_h_moe": False,
    "qwen35": False, "qwen35moe": False, "qwen3next": False, "step35": True,
}  # fmt: skip
_GGUF_UINT32 = 4  # gguf.h: enum gguf_type
# Tokens a head may lag behind before it reads them: one sweep over its layer for all, and none for rejected drafts.
_CATCH_UP_TOKENS = 32
_LONGEST = 16
# Guesses the head itself takes for less likely than this are not worth a row of the model's sweep. Assumed: no real
# head was measured here, and the engine learns from the stops as it does from rejections.
_LEAST_PROBABILITY = 0.4
# Probabilities are taken among as many candidates, as in the reference.
_CANDIDATES = 10


def staging_functions(llama: Any) -> dict[str, Any] | None:
    """llama.cpp's functions for hidden rows, by our names; None where this build does not export them."""
    library = llama.llama_cpp._lib
    found = {}
    for name, (symbol, result, arguments) in SYMBOLS.items():
        try:
            function = getattr(library, symbol)
        except AttributeError:
            return None
        function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]
        found[name] = function
    return found


def why_not(llama: Any, path: Path) -> str | None:
    """None if the heads in this GGUF can draft here, else the reason. Reads headers only."""
    if staging_functions(llama) is None:
        return "this build of llama.cpp does not export what drafting with a model's own heads needs"
    headers = [_Header(p) for p in _parts(path)]
    try:
        first = headers[0]
        architecture = first.text("general.architecture")
        n_heads = first.number(f"{architecture}.nextn_predict_layers")
        if not n_heads:
            return "its header names no draft heads (nextn_predict_layers)"
        if architecture not in _ARCHITECTURES:
            return f"llama.cpp can't run the draft heads of {architecture!r} models beside the model"
        if n_heads > 1 and not _ARCHITECTURES[architecture]:
            return f"llama.cpp runs one draft head of {architecture!r} models, and this file has {n_heads}"
        if architecture == "deepseek2" and not first.number("deepseek2.attention.key_length_mla"):
            return "llama.cpp runs the draft head of 'deepseek2' models only with MLA attention"
        head = f"blk.{first.number(f'{architecture}.block_count') - n_heads}.nextn.eh_proj.weight"
        if not any(h.has_tensor(head) for h in headers):
            return "its header names draft heads, but their weights are not in it"
        return None
    finally:
        for header in headers:
            header.close()


def _parts(path: Path) -> list[Path]:
    """All files of a split GGUF, or the one."""
    named = re.fullmatch(r"(.*-)00001(-of-\d{5}\.gguf)", path.name)
    if named is None:
        return [path]
    return sorted(path.parent.glob(f"{glob.escape(named[1])}[0-9][0-9][0-9][0-9][0-9]{glob.escape(named[2])}"))


class _Header:
    """The header of one GGUF file, through ggml's own reader (gguf.h)."""

    class _Params(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    def __init__(self, path: Path) -> None:
        from llama_cpp._ggml import libggml

        self._library = libggml
        self._file = self._call("gguf_init_from_file", ctypes.c_void_p, str(path).encode(), self._Params(True, None))
        if not self._file:
            raise LoadError(f"the header of {path.name!r} can't be read")

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        return function(*arguments)

    def _find(self, kind: str, name: str) -> int:
        return int(self._call(f"gguf_find_{kind}", ctypes.c_int64, ctypes.c_void_p(self._file), name.encode()))

    def text(self, key: str) -> str:
        at = self._find("key", key)
        if at < 0:
            return ""
        value = self._call("gguf_get_val_str", ctypes.c_char_p, ctypes.c_void_p(self._file), ctypes.c_int64(at))
        return str(value.decode())

    def number(self, key: str) -> int:
        at = self._find("key", key)
        if at < 0:
            return 0
        arguments = ctypes.c_void_p(self._file), ctypes.c_int64(at)
        if self._call("gguf_get_kv_type", ctypes.c_int, *arguments) != _GGUF_UINT32:
            return 0
        return int(self._call("gguf_get_val_u32", ctypes.c_uint32, *arguments))

    def has_tensor(self, name: str) -> bool:
        return self._find("tensor", name) >= 0

    def close(self) -> None:
        self._call("gguf_free", None, ctypes.c_void_p(self._file))


@dataclass
class _HeadsLine:
    """A sequence as the head knows it: its KV holds positions below `read`; `unread` are the tokens from there on that
    the model has read and it has not. `rows[i]` is the hidden row before `unread[i]`; the last one is the newest."""

    read: int
    rows: list[Rows]
    unread: list[int] = field(default_factory=list)


class MtpHeads:
    """The second context, and what it does to follow the model's. Belongs to the backend's thread."""

    def __init__(self, llama: Any, model: Any, target: Any, context: Any) -> None:
        functions = staging_functions(llama)
        assert functions is not None, "checked before anything was loaded"
        self._llama, self._target, self._context = llama, target, context
        self._functions = functions
        self._memory = llama.llama_get_memory(context)
        self._n_rows = int(llama.llama_model_n_embd_out(model))
        self._n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))
        self._n_heads = max(1, int(llama.llama_model_n_layer_nextn(model)))
        self._n_batch = int(llama.llama_n_batch(context))
        self._batch = _Batch(llama, self._n_batch, self._n_rows)
        self._lines: dict[SequenceId, _HeadsLine] = {}
        # Every row of the model's steps, and of the heads' only those that are asked for.
        functions["set_rows"](target, True, False)
        functions["set_rows"](context, True, True)

    @property
    def longest(self) -> int:
        """Longest draft, in tokens: several heads guess one token each, a single one guesses on from its own."""
        return self._n_heads if self._n_heads > 1 else _LONGEST

    # --- following the model -------------------------------------------------------------------------------------

    def open(self, sequence: SequenceId) -> None:
        self._lines[sequence] = _HeadsLine(0, [self._unknown()])

    def close(self, sequence: SequenceId) -> None:
        self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._lines.pop(sequence, None)

    def stepped(self, chunks: Seq[Chunk]) -> None:
        """The model has read `chunks` in one llama_decode: keep their hidden rows, and read what has piled up."""
        rows = self._view(self._target, sum(len(c.tokens) for c in chunks))
        at = 0
        late: list[SequenceId] = []
        for chunk in chunks:
            line, n = self._lines[chunk.sequence], len(chunk.tokens)
            line.unread.extend(chunk.tokens)
            line.rows.extend(rows[at : at + n].copy())
            at += n
            if len(line.unread) >= _CATCH_UP_TOKENS:
                late.append(chunk.sequence)
        self.catch_up(late)

    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        line = self._lines[sequence]
        keep = n_tokens - line.read
        if keep >= 0:
            del line.unread[keep:], line.rows[keep + 1 :]
            return
        self._llama.llama_memory_seq_rm(self._memory, sequence, n_tokens, -1)
        self._lines[sequence] = _HeadsLine(n_tokens, [self._unknown()])

    def fork(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        """`target` (open, empty) begins with the first `n_tokens` of `source`."""
        line = self._lines[source]
        keep = n_tokens - line.read
        held = min(n_tokens, line.read)
        if held:
            self._llama.llama_memory_seq_cp(self._memory, source, target, 0, held)
        if keep >= 0:
            self._lines[target] = _HeadsLine(held, line.rows[: keep + 1], line.unread[:keep])
        else:
            self._lines[target] = _HeadsLine(held, [self._unknown()])

    def catch_up(self, sequences: Seq[SequenceId]) -> None:
        """Read everything unread of `sequences`, in as few sweeps as the batch allows."""
        waiting = [(s, i) for s in sequences for i in range(len(self._lines[s].unread))]
        for begin in range(0, len(waiting), self._n_batch):
            self._read(waiting[begin : begin + self._n_batch])
        for sequence in sequences:
            line = self._lines[sequence]
            line.read += len(line.unread)
            # A copy: the row is part of its step's whole block.
            line.unread, line.rows = [], [line.rows[-1].copy()]

    def _read(self, places: list[tuple[SequenceId, int]]) -> None:
        """One sweep, under each head, over these (sequence, index among its unread)."""
        batch = self._batch
        first: dict[SequenceId, int] = {}
        batch.clear()
        for sequence, i in places:
            line = self._lines[sequence]
            first.setdefault(sequence, line.read + i)
            batch.add_row(line.unread[i], line.read + i, sequence, line.rows[i], output=False)
        for head in range(self._n_heads):
            if head:
                # Each head has a layer of its own: the same cells are written again, for that layer.
                for sequence, position in first.items():
                    self._llama.llama_memory_seq_rm(self._memory, sequence, position, -1)
            if not self.decode(head):
                for sequence in first:
                    self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
                return

    def decode(self, head: int) -> bool:
        if self._n_heads > 1:
            self._functions["set_head"](self._context, head)
        done = int(self._llama.llama_decode(self._context, self._batch.native)) == 0
        if self._n_heads > 1:
            self._functions["set_head"](self._context, 0)
        return done

    # --- drafting ------------------------------------------------------------------------------------------------

    def draft(self, wanted: Seq[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """Guesses for each (sequence, its newest token, which the model has not read, most tokens): the heads' best,
        shorter where they are not sure. All sequences in lockstep; nothing of it stays in the heads' memory."""
        drafts: list[list[int]] = [[] for _ in wanted]
        self.catch_up([sequence for sequence, _, _ in wanted])
        rows: list[list[Rows]] = [[self._lines[sequence].rows[-1]] for sequence, _, _ in wanted]
        active = [i for i, (_, _, most) in enumerate(wanted) if most > 0][: self._n_batch // self._n_heads]
        step = 0
        while active and step < self.longest:
            self._batch.clear()
            for i in active:
                self._lay(wanted[i], drafts[i], rows[i], step)
            if not self.decode(step if self._n_heads > 1 else 0):
                break
            # All rows are outputs: whether a model's graph gives the hidden rows of all or of outputs, they are these.
            n = int(self._batch.native.n_tokens)
            each = n // len(active)
            logits, hidden = self._logits(n), self._view(self._context, n)
            going_on = []
            for k, i in enumerate(active, start=1):
                token, probability = best(logits[k * each - 1])
                if probability < _LEAST_PROBABILITY:
                    continue
                drafts[i].append(token)
                rows[i].append(hidden[k * each - 1].copy())
                if len(drafts[i]) < wanted[i][2]:
                    going_on.append(i)
            active = going_on
            step += 1
        for sequence, _, _ in wanted:
            self._llama.llama_memory_seq_rm(self._memory, sequence, self._lines[sequence].read, -1)
        return drafts

    def _lay(self, want: tuple[SequenceId, int, int], drafted: list[int], rows: list[Rows], step: int) -> None:
        """Put a sequence's next drafting rows into the batch. A single head goes on from its last guess; of several,
        each reads everything since the model's last token again, as it alone can write its layer's KV."""
        sequence, newest, _ = want
        base = self._lines[sequence].read
        tokens = [newest, *drafted]
        begin = 0 if self._n_heads > 1 else step
        if begin == 0 and step:
            self._llama.llama_memory_seq_rm(self._memory, sequence, base, -1)
        for i in range(begin, step + 1):
            self._batch.add_row(tokens[i], base + i, sequence, rows[i], output=True)

    def _logits(self, n: int) -> Rows:
        address = ctypes.cast(self._llama.llama_get_logits(self._context), ctypes.c_void_p).value
        return _floats(address, n, self._n_vocab)

    def _view(self, context: Any, n: int) -> Rows:
        """The first `n` hidden rows of a context's last llama_decode: valid until its next."""
        return _floats(self._functions["rows"](context), n, self._n_rows)

    def _unknown(self) -> Rows:
        """The row before a position whose past was not seen (imported, or cut back to): zeros, as at the beginning."""
        return np.zeros(self._n_rows, dtype=np.float32)

    # --- in and out ----------------------------------------------------------------------------------------------

    def export_range(self, sequence: SequenceId, start: int, stop: int, by_way_of: int) -> bytes:
        """The heads' KV of tokens [start, stop), by way of another sequence where it is not the whole."""
        self.catch_up([sequence])
        source = by_way_of
        if source != sequence:
            self._llama.llama_memory_seq_cp(self._memory, sequence, source, start, stop)
        size = self._llama.llama_state_seq_get_size(self._context, source)
        write, context = self._llama.llama_state_seq_get_data, self._context
        data = written(b"", size, lambda target: int(write(context, target, size, source)))
        if source != sequence:
            self._llama.llama_memory_seq_rm(self._memory, source, -1, -1)
        return data

    def import_range(
        self, sequence: SequenceId, data: NDArray[np.uint8], start: int, stop: int, by_way_of: int
    ) -> None:
        """Append tokens [start, stop) of what `export_range` gave. KV that doesn't fit is forgotten, not an error: the
        heads then begin to read at `stop`."""
        self.catch_up([sequence])
        target = by_way_of
        pointer = np.ascontiguousarray(data).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = self._llama.llama_state_seq_set_data(self._context, pointer, len(data), target)
        held = int(self._llama.llama_memory_seq_pos_max(self._memory, target)) + 1
        whole = read == len(data) and held >= stop
        if target != sequence:
            if whole:
                self._llama.llama_memory_seq_cp(self._memory, target, sequence, start, stop)
            self._llama.llama_memory_seq_rm(self._memory, target, -1, -1)
        if not whole:
            self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._lines[sequence] = _HeadsLine(stop, [self._unknown()])

    def free(self) -> None:
        self._llama.llama_free(self._context)


def best(logits: Rows) -> tuple[int, float]:
    """(the likeliest token, its probability among the ten likeliest)."""
    n = min(_CANDIDATES, len(logits))
    top = np.argpartition(logits, -n)[-n:]
    values = logits[top].astype(np.float64)
    at = int(values.argmax())
    return int(top[at]), float(1.0 / np.exp(values - values[at]).sum())


def _floats(address: int | None, rows: int, width: int) -> Rows:
    assert address is not None
    kind = ctypes.c_float * (rows * width)
    flat: Rows = np.frombuffer(memoryview(kind.from_address(address)), dtype=np.float32)
    return flat.reshape(rows, width)


class _Batch(Batch):
    """One llama_batch whose rows carry both a token and a hidden row."""

    def __init__(self, llama: Any, capacity: int, width: int) -> None:
        super().__init__(llama, capacity)
        self._rows: Rows = np.zeros((capacity, width), dtype=np.float32)
        self.native.embd = self._rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def add_row(self, token: int, position: int, sequence: SequenceId, row: Rows, *, output: bool) -> None:
        self._rows[self.native.n_tokens] = row
        self.add(sequence, position, [token], int(output))
