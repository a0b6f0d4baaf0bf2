"""Reference drafts of a trained drafter, computed separately from the product as in llama.cpp's own
driver: each row at its own position, in one pass over the complete history."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from llama_cpp import llama_cpp

from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp.native import start_native
from localllm_backends.llamacpp.weights import load_model
from models import tiny_drafters, tiny_gguf


class DSparkHeads:
    """The Markov head and the confidence head in a drafter's file, applied to a block's logits from
    the same drafter without these heads."""

    def __init__(self, path: Path) -> None:
        self._weights = {
            t.name: np.array(t.data, dtype=np.float64)
            for t in gguf.GGUFReader(path).tensors
            if "weight" in t.name
        }

    def walk(self, newest: int, logits: np.ndarray) -> list[int]:
        """Each position's guess conditions the next one. A position with low confidence ends the
        draft."""
        before, after = (self._weights[f"markov_w{i}.weight"] for i in (1, 2))
        sure = self._weights.get("conf_proj.weight")
        hidden = np.linalg.lstsq(self._weights["output.weight"], logits.T, rcond=None)[0].T
        tokens = [newest]
        for place, row in zip(hidden, logits, strict=True):
            seen = before[tokens[-1]]
            scores = row + after @ seen
            best = np.sort(scores)[-10:]
            certainty = 1 / np.exp(best - best[-1]).sum()
            if sure is not None:
                certainty = float(
                    1 / (1 + np.exp(-sure.reshape(-1) @ np.concatenate([place, seen])))
                )
            if certainty < 0.4:
                break
            tokens.append(int(scores.argmax()))
        return tokens[1:]


class Reference:
    """A model and its drafter, run from scratch for every history."""

    def __init__(
        self, model: Path, drafter: Path, block: int, spark: DSparkHeads | None = None
    ) -> None:
        self._spark = spark
        spec = LoadSpec(str(model))
        self._model, self._drafter = (
            load_model(model, spec, None)[0],
            load_model(drafter, spec, None, drafter=True)[0],
        )
        self._llama, self._block = start_native(), block
        fields = gguf.GGUFReader(drafter).fields.items()
        layers = [field.contents() for name, field in fields if name.endswith(".target_layers")]
        self._layers = layers[0] if layers else []

    def _context(self, model: int, other: int | None = None) -> int:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 512, 512, 512, 1
        params.n_threads = params.n_threads_batch = 1
        params.ctx_other = other
        context = llama_cpp.llama_init_from_model(model, params)
        assert context
        return context  # type: ignore[no-any-return]

    def _array(self, pointer: Any, n: int, width: int = tiny_drafters.E) -> np.ndarray:
        return np.ctypeslib.as_array(pointer, (n, width)).copy()

    def _run(
        self,
        context: int,
        entries: Sequence[tuple[int | None, int, np.ndarray | None]],
        *,
        encode: bool = False,
    ) -> None:
        """Process (token, position, row) entries in one pass with all outputs."""
        batch = llama_cpp.llama_batch_ext_init(context)
        kept = []
        for token, position, row in entries:
            if row is not None:
                kept.append(np.ascontiguousarray(row))
                embd = llama_cpp.llama_embd(
                    kept[-1].ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, len(row)
                )
            if token is None:
                at = llama_cpp.llama_batch_ext_add_embd(batch, 0, embd)
            else:
                at = llama_cpp.llama_batch_ext_add_token(batch, 0, token)
                if row is not None:
                    assert llama_cpp.llama_batch_ext_set_embd_token(batch, at, embd)
            llama_cpp.llama_batch_ext_set_pos(batch, at, ctypes.byref(ctypes.c_int32(position)))
            llama_cpp.llama_batch_ext_set_output_logits(batch, at, token is not None)
        kind = (
            llama_cpp.LLAMA_PROCESS_TYPE_ENCODE if encode else llama_cpp.LLAMA_PROCESS_TYPE_DECODE
        )
        assert llama_cpp.llama_process(context, kind, batch) == 0
        llama_cpp.llama_batch_ext_free(batch)

    def draft(
        self, history: list[int], most: int, unseen: tuple[int, ...] = (), begin: int = 0
    ) -> list[int]:
        """Return the best guesses after `history`, whose last token the model has not computed.
        `unseen`: positions before which the model's hidden row is unknown. `begin`: the first
        position that the drafter reads."""
        target = self._context(self._model)
        if self._block < 0:
            return self._assistant(target, history, most, known=len(history) - 1 not in unseen)
        for layer in self._layers:
            self._llama.llama_set_embeddings_layer_inp(target, layer, True)
        read = history[:-1]
        self._run(target, [(token, i, None) for i, token in enumerate(read)])
        layers = [
            self._array(self._llama.llama_get_embeddings_layer_inp(target, layer), len(read))
            for layer in self._layers
        ]
        rows = np.concatenate(layers, axis=1)
        rows[[p - 1 for p in unseen]] = 0
        context = self._context(self._drafter, target)
        # Each token is read together with the row before it.
        first = max(begin - 1, 0)
        made = (
            self._eagle3(context, history[first:], rows[first:], most)
            if not self._block
            else self._dflash(context, history[first:], rows[first:], most)
        )
        llama_cpp.llama_free(context)
        llama_cpp.llama_free(target)
        return made

    def _eagle3(self, context: int, history: list[int], rows: np.ndarray, most: int) -> list[int]:
        self._llama.llama_set_embeddings_nextn(context, True, True)
        self._run(context, [(None, i, row) for i, row in enumerate(rows)], encode=True)
        fused = self._array(self._llama.llama_get_embeddings_nextn(context), len(rows))
        self._run(context, [(history[i + 1], i, row) for i, row in enumerate(fused)])
        tokens: list[int] = []
        at = len(fused) - 1
        for position in range(len(fused), len(fused) + most):
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(context, at), shape=(tiny_gguf.VOCAB,)
            )
            tokens.append(int(logits.argmax()))
            hidden = self._array(self._llama.llama_get_embeddings_nextn(context), at + 1)[at]
            self._run(context, [(tokens[-1], position, hidden)])
            at = 0
        return tokens

    def _assistant(self, target: int, history: list[int], most: int, *, known: bool) -> list[int]:
        """Make all guesses at the first one's position, from the row before it and then from the
        drafter's own rows."""
        self._llama.llama_set_embeddings_nextn(target, True, False)
        at = len(history) - 1
        # Create it before the model computes: its creation empties the cells that both share.
        context = self._context(self._drafter, target)
        self._run(target, [(token, i, None) for i, token in enumerate(history[:-1])])
        row = self._array(self._llama.llama_get_embeddings_nextn(target), at)[-1] * known
        self._llama.llama_set_embeddings_nextn(context, True, True)
        tokens = [history[-1]]
        for _ in range(most):
            self._run(context, [(tokens[-1], at, row)])
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(context, 0), shape=(tiny_gguf.VOCAB,)
            )
            tokens.append(int(logits.argmax()))
            row = self._array(self._llama.llama_get_embeddings_nextn(context), 1)[0]
        llama_cpp.llama_free(context)
        llama_cpp.llama_free(target)
        return tokens[1:]

    def _dflash(self, context: int, history: list[int], rows: np.ndarray, most: int) -> list[int]:
        logits = self._block_logits(context, history, rows)
        if self._spark is None:
            return [int(row.argmax()) for row in logits][1:][:most]
        return self._spark.walk(history[-1], logits)[:most]

    def _block_logits(self, context: int, history: list[int], rows: np.ndarray) -> np.ndarray:
        llama_cpp.llama_set_causal_attn(context, False)
        self._run(context, [(None, i, row) for i, row in enumerate(rows)])
        masks = [tiny_gguf.VOCAB - 1] * (self._block - 1)
        self._run(
            context, [(token, len(rows) + i, None) for i, token in enumerate([history[-1], *masks])]
        )
        vocab = (tiny_gguf.VOCAB,)
        logits = [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), shape=vocab)
            for i in range(self._block)
        ]
        return np.stack(logits).astype(np.float64)

    def close(self) -> None:
        llama_cpp.llama_model_free(self._drafter)
        llama_cpp.llama_model_free(self._model)
