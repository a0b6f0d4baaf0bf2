"""Embedding models and rerankers on llama.cpp: BERT-like encoders, and decoders whose GGUF header
names a pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from localllm_backends.contract import LoadError, LoadSpec, Placement, StepError
from localllm_backends.control_text import LiteralText, control_texts
from localllm_backends.fingerprints import fingerprint
from localllm_backends.llamacpp.batch import Batch, Rows
from localllm_backends.llamacpp.context import made_context, model_params
from localllm_backends.llamacpp.model_info import LlamaCppVocabulary, model_info
from localllm_backends.llamacpp.native import c_string, log, start_native
from localllm_backends.llamacpp.threads import usable_cores
from localllm_backends.llamacpp.weights import open_file

# Poolings of llama.h's enum llama_pooling_type, by our names.
_POOLINGS = {"mean": "MEAN", "cls": "CLS", "last": "LAST", "rank": "RANK"}
_NO_TOKEN = -1
# Pooling needs a full input in one micro-batch, and buffers grow with the micro-batch. So the
# default is 2,048 tokens.
_DEFAULT_CTX = 2048
_MAX_SEQUENCES = 32


class LlamaCppEmbedder:
    """A loaded embedding model, or a reranker (`pooling` "rank"), whose rows are scores.

    Not thread-safe: only its owner's thread may call it.
    """

    def __init__(self, llama: Any, model: Any, context: Any, spec: LoadSpec) -> None:
        self._llama = llama
        self._model = model
        self._context = context
        self._vocab = llama.llama_model_get_vocab(model)
        self._words = LlamaCppVocabulary(llama, model)
        self._n_batch = int(llama.llama_n_ubatch(context))
        self._n_seq_max = int(llama.llama_n_seq_max(context))
        self._batch = Batch(llama, self._n_batch)
        self.pooling = _pooling(llama, context)
        if self.pooling == "rank":
            self.n_embd = int(llama.llama_model_n_cls_out(model))
        else:
            self.n_embd = int(llama.llama_model_n_embd_out(model))
        self.info = model_info(
            self._words,
            llama,
            model,
            spec,
            fingerprint=fingerprint(Path(spec.path)),
            n_ctx=self._n_batch,
            n_seq_max=self._n_seq_max,
            n_batch=self._n_batch,
            n_outputs=0,
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of `text`, with CLS, SEP or EOS if the model needs them.

        Control tokens in the text are treated as text.
        """
        return self._tokens_of_text(text, add_bos=True)

    def _tokens_of_text(self, text: str, *, add_bos: bool = False) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"the input must be a text, not {type(text).__name__}")
        return self._words.tokenize(LiteralText(text), special=False, add_bos=add_bos)

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        """Return a reranker's input for a query and a document.

        It is the model's own rerank template, if there is one (Qwen3-Reranker). Otherwise it is
        CLS, the query, EOS and SEP, the document, EOS, each control token only if the model needs
        it. llama.cpp's server builds the same input.
        """
        template = self._llama.llama_model_chat_template(self._model, b"rerank")
        if template:
            return self._by_template(template.decode("utf-8", "replace"), query, document)
        llama = self._llama
        vocab = self._vocab
        sep = int(llama.llama_vocab_sep(vocab))
        end: list[int] = []
        if llama.llama_vocab_get_add_eos(vocab):
            eos = int(llama.llama_vocab_eos(vocab))
            end.append(sep if eos == _NO_TOKEN else eos)
        tokens: list[int] = []
        if llama.llama_vocab_get_add_bos(vocab):
            tokens.append(int(llama.llama_vocab_bos(vocab)))
        tokens += [*self._tokens_of_text(query), *end]
        if llama.llama_vocab_get_add_sep(vocab):
            tokens.append(sep)
        return [*tokens, *self._tokens_of_text(document), *end]

    def _by_template(self, template: str, query: str, document: str) -> list[int]:
        """Fill in the template. Its own control tokens are parsed; those in a query or document are
        text."""
        controls = control_texts(self._words.control_texts)
        query = controls.marked(query)
        document = controls.marked(document)
        # Fill in both at once, so that a literal {document} in a query stays text.
        parts = [part.replace("{document}", document) for part in template.split("{query}")]
        tokens: list[int] = []
        for run in controls.runs(query.join(parts)):
            tokens += self._words.tokenize(run, special=not isinstance(run, LiteralText))
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        ids = (self._llama.llama_token * len(tokens))(*tokens)

        def fill(buffer: Any, size: int) -> Any:
            return self._llama.llama_detokenize(
                self._vocab, ids, len(tokens), buffer, size, False, True
            )

        return c_string(fill, size=16 * len(tokens) + 64) or ""

    def embed(self, inputs: Sequence[Sequence[int]]) -> Rows:
        """Return one row of `n_embd` numbers per input, normalised to length 1, or a reranker's raw
        scores.

        Each llama_decode takes as many inputs as fit. The caller must make sure that each input has
        1 to `info.n_ctx` valid tokens. Raises StepError.
        """
        if not inputs:
            return np.zeros((0, self.n_embd), dtype=np.float32)
        rows: list[Rows] = []
        group: list[Sequence[int]] = []
        n_tokens = 0
        for tokens in inputs:
            if n_tokens + len(tokens) > self._n_batch or len(group) == self._n_seq_max:
                rows += self._run(group)
                group = []
                n_tokens = 0
            group.append(tokens)
            n_tokens += len(tokens)
        return np.stack(rows + self._run(group))

    def _run(self, group: Sequence[Sequence[int]]) -> list[Rows]:
        self._batch.clear()
        for sequence, tokens in enumerate(group):
            self._batch.add(sequence, 0, tokens, len(tokens))
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        log.mark()
        code = self._llama.llama_decode(self._context, self._batch.native)
        if code != 0:
            n = sum(len(tokens) for tokens in group)
            raise StepError(f"llama.cpp could not embed {n} tokens ({code}): {log.reason()}")
        rows = []
        for sequence in range(len(group)):
            found = self._llama.llama_get_embeddings_seq(self._context, sequence)
            row = np.ctypeslib.as_array(found, shape=(self.n_embd,)).astype(np.float32)
            if self.pooling != "rank":
                length = np.linalg.norm(row)
                if length > 0:
                    row = row / np.float32(length)
            rows.append(row)
        return rows

    def close(self) -> None:
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)


def _pooling(llama: Any, context: Any) -> str:
    """Return our name of the context's pooling; "" without pooling."""
    number = int(llama.llama_pooling_type(context))
    for name, constant in _POOLINGS.items():
        if number == getattr(llama, f"LLAMA_POOLING_TYPE_{constant}"):
            return name
    return ""


def _pooling_to_set(llama: Any, model: Any) -> int:
    """Return the pooling parameter of a new context.

    Class labels mean a classifier on top of an encoder. Its header may name the encoder's pooling.
    """
    if llama.llama_model_cls_label(model, 0):
        return int(llama.LLAMA_POOLING_TYPE_RANK)
    return int(llama.LLAMA_POOLING_TYPE_UNSPECIFIED)


def load_embedder(
    path: str,
    *,
    n_ctx: int = 0,
    n_threads: int = 0,
    n_gpu_layers: int = -1,
    on_progress: Callable[[float], None] | None = None,
) -> LlamaCppEmbedder:
    """Load a GGUF file that computes embeddings or scores.

    `n_ctx` 0 = the model's own context, at most 2,048 tokens. Raises LoadError, also for files that
    generate text, and OutOfMemoryError.
    """
    llama = start_native()
    missing = llama.missing("embeddings")
    if missing:
        raise LoadError(f"this llama.cpp makes no embeddings: {missing}", "localllm setup")
    spec = LoadSpec(path, placement=Placement(gpu_layers=n_gpu_layers))
    model = open_file(Path(path), model_params(llama, spec), on_progress)
    with ExitStack() as freed:
        freed.callback(llama.llama_model_free, model)
        trained = int(llama.llama_model_n_ctx_train(model))
        tokens = min(n_ctx or _DEFAULT_CTX, trained or n_ctx or _DEFAULT_CTX)
        threads = n_threads or usable_cores()
        context = made_context(
            model,
            embeddings=True,
            pooling_type=_pooling_to_set(llama, model),
            n_ctx=tokens,
            n_batch=tokens,
            n_ubatch=tokens,
            n_seq_max=min(_MAX_SEQUENCES, tokens),
            kv_unified=True,
            n_threads=threads,
            n_threads_batch=threads,
        )
        freed.callback(llama.llama_free, context)
        if not _pooling(llama, context):
            raise LoadError(
                f"{Path(path).name!r} is not an embedding model: its header has no pooling "
                "type, so it generates text"
            )
        freed.pop_all()
    return LlamaCppEmbedder(llama, model, context, spec)
