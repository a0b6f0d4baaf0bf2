"""Facts about a loaded GGUF file: its vocabulary (from text to token ids and back, for any thread)
and its ModelInfo."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

from localllm_backends.contract import Capabilities, LoadSpec, ModelInfo
from localllm_backends.control_text import NEVER
from localllm_backends.llamacpp.heads import DraftHeads
from localllm_backends.llamacpp.native import c_string, start_native
from localllm_backends.llamacpp.weights import kv_layout, kv_meaning, open_file
from localllm_backends.vocabulary import TokenBytes

# Longer texts are split into pieces of about this size, which take a millisecond each.
PIECE_CHARS = 2**12


class LlamaCppVocabulary(TokenBytes):
    def __init__(self, llama: Any, model: Any) -> None:
        self._llama = llama
        self._vocab = llama.llama_model_get_vocab(model)
        n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))
        control = llama.LLAMA_TOKEN_ATTR_CONTROL
        asked_for = control | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        more_than_text = asked_for | llama.LLAMA_TOKEN_ATTR_USER_DEFINED
        # PYFUNCTYPE keeps Python's lock during the call. Releasing it for each of the many tokens
        # would double the time.
        address = ctypes.cast(llama.llama_vocab_get_attr, ctypes.c_void_p).value or 0
        ask = ctypes.PYFUNCTYPE(ctypes.c_int)(address)
        attributes = map(ask, repeat(ctypes.c_void_p(self._vocab)), range(n_vocab))
        # Tokens with their attributes (llama.h: enum llama_token_attr).
        self.special = {t: kind for t, kind in enumerate(attributes) if kind & more_than_text}
        # `controls` are parsed only with `special`; `added` tokens are parsed in any text.
        controls: list[str] = []
        added: list[str] = []
        # Control tokens that leave the text before them unchanged.
        cuts: list[str] = []
        for token, kind in self.special.items():
            text = llama.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace")
            if kind & asked_for:
                controls.append(text)
            else:
                added.append(text)
            if text and kind & control and not kind & llama.LLAMA_TOKEN_ATTR_LSTRIP:
                cuts.append(text)
        super().__init__(n_vocab, controls, added)
        longest_first = sorted(cuts, key=len, reverse=True)
        pattern = "|".join(re.escape(text) for text in longest_first)
        self._cuts = re.compile(pattern or NEVER)

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        tokens: list[int] = []
        for piece in self.text_pieces(text, special=special, add_bos=add_bos):
            tokens += self._read(piece, special, add_bos)
            add_bos = False
        return tokens

    def text_pieces(self, text: str, *, special: bool, add_bos: bool) -> Iterator[str]:
        adds_end = add_bos and self._llama.llama_vocab_get_add_eos(self._vocab)
        for part in self.always_parsed.pieces(text):
            if special and not adds_end:
                yield from self._before_controls(part)
            else:
                yield part
            adds_end = False

    def _before_controls(self, text: str) -> Iterator[str]:
        """Split `text` before control tokens.

        After each control token, llama.cpp searches all of the remaining text for the next one. So
        40,000 short messages took 17.4 s at once, and 2.2 s in pieces.
        """
        begin = 0
        if len(text) > PIECE_CHARS:
            for found in self._cuts.finditer(text):
                if found.start() - begin >= PIECE_CHARS:
                    yield text[begin : found.start()]
                    begin = found.start()
        yield text[begin:]

    def _read(self, text: str, special: bool, add_bos: bool) -> list[int]:
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 8
        while True:
            buffer = (self._llama.llama_token * capacity)()
            n = self._llama.llama_tokenize(
                self._vocab, data, len(data), buffer, capacity, add_bos, special
            )
            if n >= 0:
                return list(buffer[:n])
            capacity = -n

    def _bytes(self, token: int, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._llama.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return bytes(buffer.raw[:n])
            size = -n

    def is_control(self, token: int) -> bool:
        return bool(self._llama.llama_vocab_is_control(self._vocab, token))


def vocabulary(path: str) -> list[bytes]:
    """Return the bytes of every token, control tokens as they are written.

    Reads only the header. Raises LoadError if it can't be read.
    """
    llama = start_native()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = open_file(Path(path), params)
    words = LlamaCppVocabulary(llama, model)
    tokens = [words.token_bytes(token, special=True) for token in range(words.n_vocab)]
    llama.llama_model_free(model)
    return tokens


_FIM = ("pre", "suf", "mid", "pad", "rep", "sep")


def model_info(
    words: LlamaCppVocabulary, llama: Any, model: Any, spec: LoadSpec, **served: Any
) -> ModelInfo:
    """Return the facts about `model`.

    `served` are fields that depend on how it is served (fingerprint, n_ctx, n_seq_max …).
    """
    vocab = llama.llama_model_get_vocab(model)
    value = llama.llama_model_meta_val_str
    architecture = c_string(value, model, b"general.architecture")
    name = c_string(value, model, b"general.name")
    n_ctx_train = int(llama.llama_model_n_ctx_train(model))
    n_params = int(llama.llama_model_n_params(model))
    weights_bytes = int(llama.llama_model_size(model))
    adds_bos = bool(llama.llama_vocab_get_add_bos(vocab))
    marks = _marks(llama, vocab)
    bos = marks.get("bos")
    eos = marks.get("eos")
    fim_tokens = {}
    for role in _FIM:
        if f"fim_{role}" in marks:
            fim_tokens[role] = marks[f"fim_{role}"]
    # Tokens that may end an answer: control tokens, and those named in the header. Checking every
    # token would take as long as loading a small model.
    end_of_message = c_string(value, model, b"tokenizer.ggml.eom_token_id")
    end_of_turn = int(llama.llama_vocab_eot(vocab))
    likely = {*words.special, *marks.values(), int(end_of_message or -1), end_of_turn}
    eog_tokens = tuple(t for t in sorted(likely) if llama.llama_vocab_is_eog(vocab, t))
    template = llama.llama_model_chat_template(model, None)
    chat_template = template.decode("utf-8", "replace") if template else None
    served |= {"fim_tokens": fim_tokens, "control_texts": words.control_texts}
    return ModelInfo(
        architecture=architecture or "",
        description=name or Path(spec.path).stem,
        n_vocab=words.n_vocab,
        n_ctx_train=n_ctx_train,
        n_params=n_params,
        weights_bytes=weights_bytes,
        eog_tokens=eog_tokens,
        bos_token=bos,
        eos_token=eos,
        adds_bos=adds_bos,
        bos_text=words.text(bos),
        eos_text=words.text(eos),
        chat_template=chat_template,
        kv_type_k=spec.kv_type_k,
        kv_type_v=spec.kv_type_v,
        kv_meaning=kv_meaning(),
        kv_layout=kv_layout(),
        **served,
    )


def _marks(llama: Any, vocab: Any) -> dict[str, int]:
    """Return this vocabulary's special tokens (BOS, EOS, FIM) by llama.cpp's names."""
    found = {}
    for name in ("bos", "eos", *(f"fim_{role}" for role in _FIM)):
        token = int(getattr(llama, f"llama_vocab_{name}")(vocab))
        if token >= 0:
            found[name] = token
    return found


def capabilities(
    heads: DraftHeads | None,
    *,
    window_rewind: int,
    recurrent: bool,
    n_rewind: int,
    states: bool,
    on_device: bool,
) -> Capabilities:
    """Return the capabilities of a context.

    `window_rewind`: tokens for which sliding windows have room in addition to their own size (0: no
    windows). `n_rewind`: snapshots of a recurrent state. `states`: states can be exported
    separately.
    """
    keeps_all = not window_rewind and not recurrent
    rewind: Literal["any", "bounded", "none"] = "none"
    if keeps_all:
        rewind = "any"
    elif window_rewind or n_rewind:
        rewind = "bounded"
    drafts = 0
    draft_kind = ""
    if heads is not None:
        drafts = heads.longest
        draft_kind = heads.kind
    # Draft heads and rollback read the results of a step before it returns.
    reads_steps = heads is not None or (recurrent and n_rewind > 0)
    # Not used on a GPU, where the micro-batch of a step takes little time.
    sliced_prefill = keeps_all and heads is None and not on_device
    return Capabilities(
        rewind=rewind,
        rewind_tokens=n_rewind if recurrent else window_rewind,
        shares_cells=True,
        unified=True,
        segments=keeps_all or states,
        states=states,
        threaded=True,
        interruptible=not recurrent,  # attention can undo half a step, a recurrent state can't
        drafts=drafts,
        draft_kind=draft_kind,
        kv_on_device=on_device,
        slow_first_steps=on_device,
        asynchronous=on_device and not reads_steps,
        sliced_prefill=sliced_prefill,
    )
